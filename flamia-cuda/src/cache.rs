//! Cubins on disk, shared by processes: written beside their place and renamed into it, checked
//! when read.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};

use crate::source::Key;

/// The environment variable that names the cache's folder.
pub(crate) const SETTING: &str = "FLAMIA_KERNEL_CACHE";

/// What a compilation gave.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    pub image: Vec<u8>,
    pub log: String,
}

/// The cache. That its folder cannot be used is said once and fails nothing.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    said: AtomicBool,
}

impl Cache {
    pub fn at(folder: Option<PathBuf>) -> Self {
        Self {
            folder,
            said: AtomicBool::new(false),
        }
    }

    /// `FLAMIA_KERNEL_CACHE`, else a folder in the user's cache; the values of the environment
    /// variables are what `var` says.
    pub fn folder(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let path = |name| {
            var(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        // A relative one is invalid by the XDG specification, and to be ignored.
        let of_xdg = path("XDG_CACHE_HOME").filter(|folder| folder.is_absolute());
        let of_user = of_xdg.or_else(|| Some(path("HOME")?.join(".cache")));
        path(SETTING).or_else(|| Some(of_user?.join("flamia/kernels")))
    }

    /// The entry, if it is there and whole.
    pub fn read(&self, key: &Key) -> Option<Entry> {
        let bytes = fs::read(entry(self.folder.as_deref()?, key)).ok()?;
        decode(key, &bytes)
    }

    /// Keeps out other processes and threads that compile the same while the file lives. None
    /// where files cannot be locked: then several compile the same, and each result is whole.
    pub fn lock(&self, key: &Key) -> Option<File> {
        let folder = self.folder.as_deref()?;
        let lock = || -> io::Result<File> {
            fs::create_dir_all(folder)?;
            // One of 256: a lock that is deleted cannot be told from one that is held.
            let path = folder.join(format!("{:02x}.lock", key.0[0]));
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(path)?;
            file.lock()?;
            Ok(file)
        };
        lock().ok()
    }

    pub fn write(&self, key: &Key, value: &Entry) {
        let written = match self.folder.as_deref() {
            Some(folder) => write(folder, key, value),
            None => Err(io::Error::other("neither XDG_CACHE_HOME nor HOME is set")),
        };
        let Err(error) = written else { return };
        if !self.said.swap(true, Ordering::Relaxed) {
            let folder = self
                .folder
                .as_deref()
                .unwrap_or(Path::new("a cache folder"));
            eprintln!(
                "flamia-cuda: compiled kernels cannot be kept in {}: {error}\n  Every process \
                 compiles them anew; set {SETTING} to a folder that can be written",
                folder.display()
            );
        }
    }
}

fn entry(folder: &Path, key: &Key) -> PathBuf {
    folder.join(format!("{}.cubin", key.hex()))
}

fn write(folder: &Path, key: &Key, value: &Entry) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As the umask has it: the folder may be shared.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.prefix(".draft").tempfile_in(folder)?;
    file.write_all(&encode(key, value))?;
    file.persist(entry(folder, key))?;
    Ok(())
}

/// A checksum over the key and the rest; the log's length; the log; the image.
fn encode(key: &Key, value: &Entry) -> Vec<u8> {
    let length = (value.log.len() as u64).to_le_bytes();
    let payload = [&length, value.log.as_bytes(), &value.image].concat();
    [&checksum(key, &payload)[..], &payload].concat()
}

fn decode(key: &Key, bytes: &[u8]) -> Option<Entry> {
    let (sum, payload) = bytes.split_at_checked(32)?;
    if sum != checksum(key, payload) {
        return None;
    }
    let (length, rest) = payload.split_first_chunk()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (log, image) = rest.split_at_checked(length)?;
    Some(Entry {
        image: image.to_owned(),
        log: String::from_utf8(log.to_owned()).ok()?,
    })
}

fn checksum(key: &Key, payload: &[u8]) -> [u8; 32] {
    Sha256::new()
        .chain_update(key.0)
        .chain_update(payload)
        .finalize()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key([7; 32]);

    fn value() -> Entry {
        Entry {
            image: vec![0, 1, 2, 255],
            log: "ptxas info".into(),
        }
    }

    #[test]
    fn the_folder_is_the_set_one_else_the_users() {
        let home = ("HOME", "/home/a");
        let of_user = Some("/home/a/.cache/flamia/kernels");
        let cases = [
            (vec![home], of_user),
            (
                vec![home, ("XDG_CACHE_HOME", "/c")],
                Some("/c/flamia/kernels"),
            ),
            (vec![home, ("XDG_CACHE_HOME", "c")], of_user),
            (vec![home, (SETTING, "k")], Some("k")),
            (vec![home, (SETTING, "")], of_user),
            (vec![], None),
        ];
        for (vars, expected) in cases {
            let var = |name: &str| Some(vars.iter().find(|(var, _)| *var == name)?.1.into());
            assert_eq!(Cache::folder(var), expected.map(PathBuf::from), "{vars:?}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().join("made/on/demand")));
        assert_eq!(cache.read(&KEY), None);
        cache.write(&KEY, &value());
        assert_eq!(cache.read(&KEY), Some(value()));
        assert_eq!(cache.read(&Key([8; 32])), None);
    }

    #[test]
    fn an_entry_counts_only_whole_and_under_its_own_key() {
        let whole = encode(&KEY, &value());
        assert_eq!(decode(&KEY, &whole), Some(value()));
        assert_eq!(decode(&Key([8; 32]), &whole), None);
        for length in 0..whole.len() {
            assert_eq!(decode(&KEY, &whole[..length]), None, "{length}");
        }
        for index in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[index] ^= 1;
            assert_eq!(decode(&KEY, &flipped), None, "{index}");
        }
    }

    #[test]
    fn a_lock_keeps_others_out() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(Some(folder.path().to_owned()));
        let held = cache.lock(&KEY).unwrap();
        let other = File::open(folder.path().join("07.lock")).unwrap();
        assert!(other.try_lock().is_err());
        drop(held);
        other.try_lock().unwrap();
    }
}
