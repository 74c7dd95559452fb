//! Files that are whole or absent, whatever kills the process.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// How the names of files begin that are still being written. Hidden, so that nobody takes one for
/// a shard.
const UNFINISHED: &str = ".unfinished-";

/// A file that gets its name only when it is whole. Dropped before, it leaves nothing.
pub(crate) struct Unfinished {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl Unfinished {
    /// Begins a file in the folder of `path`, since a rename is atomic only inside a file system.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let mut options = tempfile::Builder::new();
        options.prefix(UNFINISHED);
        // Temporary files are private; these are as readable as any that the user creates.
        #[cfg(unix)]
        options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        Ok(Self {
            temporary: options.tempfile_in(folder_of(path))?,
            path: path.into(),
        })
    }

    pub(crate) fn file(&mut self) -> &mut File {
        self.temporary.as_file_mut()
    }

    /// Brings the bytes to the disk, then the name.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.temporary.as_file().sync_all()?;
        self.temporary
            .persist(&self.path)
            .map_err(|error| error.error)?;
        // The rename itself is on the disk only when the folder is.
        #[cfg(unix)]
        File::open(folder_of(&self.path))?.sync_all()?;
        Ok(())
    }
}

/// Puts `bytes` at `path`; what was there before stays until they are whole.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = Unfinished::create(path)?;
    unfinished.file().write_all(bytes)?;
    unfinished.finish()
}

/// Removes what killed processes left. Only for a folder in which nobody else writes.
pub(crate) fn remove_unfinished(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}
