//! Files that are whole or absent, whatever kills the process.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// How the names of files begin that are still being written.
const UNFINISHED: &str = ".writing-";

/// Why a file could not be written. The file at the path, if there was one, is as it was.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}; check the folder's permissions and the free space", path.display())]
pub struct WriteError {
    /// The file to be written.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Puts `bytes` at `path`, durably: a reader, or the machine after a crash, finds either what was
/// there before or all of `bytes`.
///
/// # Errors
/// [`WriteError`] if the folder is missing or not writable, or the disk is full.
pub fn atomic_write(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    atomic_write_with(path, |writer| writer.write_all(bytes))
}

/// [`atomic_write`] of what `write` produces.
///
/// # Errors
/// As for [`atomic_write`], and any error of `write`.
pub fn atomic_write_with(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
) -> Result<(), WriteError> {
    replace(path, write).map_err(|source| WriteError {
        path: path.into(),
        source,
    })
}

fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&mut File>) -> io::Result<()>,
) -> io::Result<()> {
    // A rename is atomic only inside one file system, hence the same folder.
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut options = tempfile::Builder::new();
    options.prefix(UNFINISHED);
    // Temporary files are private; a run's files are as readable as any that the user creates.
    #[cfg(unix)]
    options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temporary = options.tempfile_in(folder)?;
    let mut writer = BufWriter::new(temporary.as_file_mut());
    write(&mut writer)?;
    writer.flush()?;
    drop(writer);

    // The name must not reach the disk before the bytes, nor this return before the name.
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    #[cfg(unix)]
    File::open(folder)?.sync_all()?;
    Ok(())
}

/// Removes the unfinished files that killed processes left in `folder`, and says how many. Nobody
/// else may be writing there.
///
/// # Errors
/// Any error of listing the folder or of removing one of them.
pub fn remove_unfinished(folder: &Path) -> io::Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            fs::remove_file(entry.path())?;
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_write_replaces_the_file_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        atomic_write(&path, b"a longer first version").unwrap();
        atomic_write(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_failed_write_keeps_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        atomic_write(&path, b"first").unwrap();
        let error = atomic_write_with(&path, |writer| {
            writer.write_all(b"half of the sec")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert!(error.unwrap_err().to_string().contains("a.json"));
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_missing_folder_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = atomic_write(&folder.path().join("no/a.json"), b"x").unwrap_err();
        assert!(error.to_string().contains("no/a.json"), "{error}");
        assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_the_file_as_the_umask_allows() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (plain, atomic) = (folder.path().join("plain"), folder.path().join("atomic"));
        fs::write(&plain, b"x").unwrap();
        atomic_write(&atomic, b"x").unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(atomic), mode(plain));
    }

    #[test]
    fn leftovers_of_killed_writers_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".writing-Ab3"), b"half").unwrap();
        fs::write(folder.path().join("model.safetensors"), b"whole").unwrap();
        assert_eq!(remove_unfinished(folder.path()).unwrap(), 1);
        assert_eq!(names(folder.path()), ["model.safetensors"]);
    }
}
