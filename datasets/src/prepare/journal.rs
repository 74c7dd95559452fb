//! The journal that a preparation leaves beside its shards while it runs.

use std::fs;
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::PrepareOptions;
use crate::atomic;
use crate::cache::{self, CacheError, Counts, JOURNAL, MANIFEST, ShardRecord, SourceRecord};
use crate::hex;
use crate::source::{Place, SourceError, SourceFile};
use crate::tokenizer::Tokenizer;

/// A place between two records of the sources, and what became of those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cursor {
    /// The file.
    pub(super) source: usize,
    /// Records of that file before.
    pub(super) record: u64,
    /// Of all files.
    pub(super) counts: Counts,
}

/// What is whole already.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Journal {
    /// The inputs'.
    pub(super) key: String,
    /// The first record that no whole shard holds.
    pub(super) next: Cursor,
    /// The files begun.
    pub(super) sources: Vec<SourceRecord>,
    /// The whole shards.
    pub(super) shards: Vec<ShardRecord>,
}

impl Journal {
    pub(super) fn new(key: String) -> Self {
        Self {
            key,
            next: Cursor::default(),
            sources: Vec::new(),
            shards: Vec::new(),
        }
    }

    pub(super) fn read(dir: &Path) -> Result<Option<Self>, CacheError> {
        let path = dir.join(JOURNAL);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CacheError::io("read", &path)(error)),
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| CacheError::Manifest {
                path,
                reason: error.to_string(),
            })
    }

    /// Removes the journal of a preparation that is over.
    pub(super) fn remove(dir: &Path) -> Result<(), CacheError> {
        remove(&dir.join(JOURNAL))
    }

    pub(super) fn write(&self, dir: &Path) -> Result<(), CacheError> {
        let path = dir.join(JOURNAL);
        let bytes = serde_json::to_vec_pretty(self).map_err(io::Error::from);
        bytes
            .and_then(|bytes| atomic::write(&path, &bytes))
            .map_err(CacheError::io("write", &path))
    }
}

/// Removes a cache's files, the one first that makes the folder a cache.
pub(super) fn remove_cache(dir: &Path) -> Result<(), CacheError> {
    remove(&dir.join(MANIFEST))?;
    remove(&dir.join(JOURNAL))?;
    for entry in fs::read_dir(dir).map_err(CacheError::io("read", dir))? {
        let path = entry.map_err(CacheError::io("read", dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_shard =
            name.starts_with("shard-") && (name.ends_with(".bin") || name.ends_with(".idx"));
        if is_shard {
            remove(&path)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<(), CacheError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CacheError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Names the inputs. Local files by path, size and time of change: reading them all to see whether
/// they have changed would take as long as a good part of the preparation.
pub(super) fn key(
    files: &[SourceFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
) -> Result<String, SourceError> {
    let mut hash = Sha256::new();
    let selection = serde_json::to_string(&options.selection).unwrap_or_default();
    let (version, shard_tokens) = (cache::VERSION, options.shard_tokens);
    let (sha256, bos, eos) = (tokenizer.sha256(), tokenizer.bos(), tokenizer.eos());
    hash.update(format!(
        "{version} {shard_tokens} {sha256} {bos} {eos} {selection}\n"
    ));
    for file in files {
        match &file.place {
            Place::Hub(file) => hash.update(format!("{file}\n")),
            Place::Local(path) => {
                let io = |source| SourceError::Io {
                    path: path.clone(),
                    source,
                };
                let metadata = fs::metadata(path).map_err(io)?;
                let absolute = std::path::absolute(path).map_err(io)?;
                let changed = metadata.modified().map_err(io)?;
                let changed = changed.duration_since(UNIX_EPOCH).unwrap_or_default();
                let (bytes, nanos) = (metadata.len(), changed.as_nanos());
                hash.update(format!("{} {bytes} {nanos}\n", absolute.display()));
            }
        }
    }
    Ok(hex(&hash.finalize()))
}
