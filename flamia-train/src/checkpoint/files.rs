//! Files that reach the disk, and the manifest that vouches for them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::CheckpointError;

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
pub(super) const STATE: &str = "state.json";
pub(super) const MANIFEST: &str = "MANIFEST.json";

/// The layout of a checkpoint folder, raised when it changes.
const FORMAT: u32 = 1;

/// Size and hash of every other file of a checkpoint.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u32,
    files: BTreeMap<String, Entry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    sha256: String,
}

impl Manifest {
    /// Writes `bytes` to `folder/name`, syncs it to disk and takes it into the manifest.
    pub(super) fn add(
        &mut self,
        folder: &Path,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        write_synced(&folder.join(name), bytes)?;
        let entry = Entry {
            bytes: bytes.len() as u64,
            sha256: hex(&Sha256::digest(bytes)),
        };
        self.files.insert(name.into(), entry);
        Ok(())
    }

    /// Writes the manifest itself; nothing may be added to the folder afterwards.
    pub(super) fn seal(mut self, folder: &Path) -> Result<(), CheckpointError> {
        self.format = FORMAT;
        let path = folder.join(MANIFEST);
        write_synced(&path, &to_json(&self, &path)?)?;
        sync_folder(folder)
    }

    /// Reads the manifest of `folder` and compares every file with it.
    pub(super) fn verify(folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join(MANIFEST);
        let manifest: Self = from_json(&path)?;
        let damaged = |path: &Path, what| CheckpointError::Damaged {
            path: path.into(),
            what,
        };
        if manifest.format != FORMAT {
            let what = format!(
                "it is of format {}, this program reads format {FORMAT}",
                manifest.format
            );
            return Err(damaged(&path, what));
        }
        if let Some(name) = [MODEL, OPTIMIZER, STATE]
            .iter()
            .find(|n| !manifest.files.contains_key(**n))
        {
            return Err(damaged(&path, format!("it does not list {name}")));
        }
        for (name, expected) in &manifest.files {
            let path = folder.join(name);
            let found = hash_file(&path)?;
            if found.bytes != expected.bytes {
                let what = format!("{} bytes instead of {}", found.bytes, expected.bytes);
                return Err(damaged(&path, what));
            }
            if found.sha256 != expected.sha256 {
                return Err(damaged(&path, "its SHA-256 is not the one saved".into()));
            }
        }
        Ok(())
    }
}

fn hash_file(path: &Path) -> Result<Entry, CheckpointError> {
    let hash = || {
        let mut file = File::open(path)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => {
                    hasher.update(&buffer[..n]);
                    bytes += n as u64;
                }
            }
        }
        Ok(Entry {
            bytes,
            sha256: hex(&hasher.finalize()),
        })
    };
    hash().map_err(io("read", path))
}

/// Lowercase hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io("write", path))
}

/// Makes renames and new names in `folder` survive a power cut.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    // Only Unix lets a folder be opened and synced; elsewhere the rename has to do.
    if cfg!(unix) {
        File::open(folder)
            .and_then(|file| file.sync_all())
            .map_err(io("sync", folder))?;
    }
    Ok(())
}

pub(super) fn to_json<T: Serialize>(value: &T, path: &Path) -> Result<Vec<u8>, CheckpointError> {
    serde_json::to_vec_pretty(value).map_err(|source| CheckpointError::Json {
        path: path.into(),
        source,
    })
}

pub(super) fn from_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, CheckpointError> {
    let bytes = fs::read(path).map_err(io("read", path))?;
    serde_json::from_slice(&bytes).map_err(|source| CheckpointError::Json {
        path: path.into(),
        source,
    })
}

pub(super) fn io(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(std::io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    move |source| CheckpointError::Io {
        action,
        path,
        source,
    }
}
