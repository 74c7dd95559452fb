//! The token cache: tokenised documents on disk, read through memory maps.
//!
//! ```text
//! DIR/manifest.json     what the cache holds; written last, so a folder without it is no cache
//! DIR/tokenizer.json    a copy of the tokenizer, unless it is the byte-level one
//! DIR/shard-00000.bin   BOS t1 t2 .. tn, BOS t1 .. of whole documents; llm.c's layout
//! DIR/shard-00000.idx   where each document begins, its text's bytes and hash
//! DIR/prepare.json      while it is being prepared: what is whole already
//! DIR/prepare.lock      locked by the process that prepares
//! ```
//!
//! Files get their names when they are whole and never change afterwards.

mod check;
mod error;
mod index;
mod manifest;
mod map;
mod writer;

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use check::ShardCheck;
pub use error::CacheError;
pub(crate) use index::Index;
pub(crate) use manifest::VERSION;
pub use manifest::{Counts, Manifest, ShardRecord, SourceRecord, TokenizerRecord};
pub(crate) use writer::{ShardWriter, digest};

use crate::bin_file::{Header, Ids, Width};
use crate::tokenizer::{SpecialIds, Tokenizer, TokenizerError};
use map::Window;

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const JOURNAL: &str = "prepare.json";
pub(crate) const LOCK: &str = "prepare.lock";
const TOKENIZER: &str = "tokenizer.json";

/// A finished cache. Holds no file open and nothing of the tokens in memory.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: PathBuf,
    manifest: Manifest,
}

impl Cache {
    /// Reads the manifest and looks at every shard's size and header; [`Cache::check`] reads them
    /// to their ends.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn open(dir: &Path) -> Result<Self, CacheError> {
        let cache = Self::open_unchecked(dir)?;
        cache.check_all_sizes()?;
        Ok(cache)
    }

    /// Makes the folder the cache that `manifest` describes, if its shards are there.
    pub(crate) fn publish(dir: &Path, manifest: Manifest) -> Result<Self, CacheError> {
        let cache = Self {
            dir: dir.into(),
            manifest,
        };
        cache.check_all_sizes()?;
        let path = dir.join(MANIFEST);
        let bytes = cache.manifest.to_bytes().map_err(io::Error::from);
        bytes
            .and_then(|bytes| crate::atomic::write(&path, &bytes))
            .map_err(CacheError::io("write", &path))?;
        Self::open(dir)
    }

    fn check_all_sizes(&self) -> Result<(), CacheError> {
        self.manifest
            .shards
            .iter()
            .try_for_each(|shard| self.check_sizes(shard))
    }

    fn open_unchecked(dir: &Path) -> Result<Self, CacheError> {
        let path = dir.join(MANIFEST);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(if dir.join(JOURNAL).exists() {
                    CacheError::Unfinished { path: dir.into() }
                } else {
                    CacheError::NotACache { path: dir.into() }
                });
            }
            Err(error) => return Err(CacheError::io("read", &path)(error)),
        };
        Ok(Self {
            dir: dir.into(),
            manifest: Manifest::from_bytes(&path, &bytes)?,
        })
    }

    /// Whether the folder claims to be a cache, finished or not.
    pub(crate) fn is_at(dir: &Path) -> bool {
        dir.join(MANIFEST).exists() || dir.join(JOURNAL).exists()
    }

    fn check_sizes(&self, shard: &ShardRecord) -> Result<(), CacheError> {
        let path = self.bin_path(shard);
        let header = Header::read(&mut open(&path)?, &path)?;
        let expected = Header {
            width: self.manifest.width,
            tokens: shard.tokens,
        };
        if header != expected {
            return Err(CacheError::Damaged {
                path,
                reason: format!("its header says {header:?}, the manifest {expected:?}"),
            });
        }
        let path = self.index_path(shard);
        let found = open(&path)?
            .metadata()
            .map_err(CacheError::io("read", &path))?
            .len();
        let expected = index::HEADER_BYTES as u64 + shard.documents * index::ENTRY_BYTES as u64;
        if found != expected {
            return Err(CacheError::Damaged {
                path,
                reason: format!("it has {found} bytes, not {expected}"),
            });
        }
        Ok(())
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What the cache holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The tokenizer that the cache was made with, from its own copy.
    ///
    /// # Errors
    /// [`TokenizerError`] for the copy.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        let record = &self.manifest.tokenizer;
        let byte_level = Tokenizer::byte_level();
        if record.sha256 == byte_level.sha256() {
            return Ok(byte_level);
        }
        let special = SpecialIds {
            bos: Some(record.bos),
            eos: Some(record.eos),
        };
        let tokenizer = Tokenizer::from_file(&self.dir.join(TOKENIZER), special)?;
        Ok(tokenizer.named(&record.name))
    }

    /// Refuses a tokenizer that is not the cache's, or has other BOS and EOS ids.
    ///
    /// # Errors
    /// [`CacheError::Tokenizer`].
    pub fn check_tokenizer(&self, tokenizer: &Tokenizer) -> Result<(), CacheError> {
        let (ours, given) = (&self.manifest.tokenizer, TokenizerRecord::of(tokenizer));
        let identity = |of: &TokenizerRecord| (of.sha256.clone(), of.bos, of.eos);
        if identity(ours) == identity(&given) {
            return Ok(());
        }
        let words = |of: &TokenizerRecord| {
            let TokenizerRecord {
                name,
                sha256,
                bos,
                eos,
                ..
            } = of;
            format!("{name} (SHA-256 {sha256}, BOS {bos}, EOS {eos})")
        };
        Err(CacheError::Tokenizer {
            path: self.dir.clone(),
            expected: words(ours),
            found: words(&given),
        })
    }

    /// The index of shard number `shard`.
    pub(crate) fn index(&self, shard: usize) -> Result<MappedIndex, CacheError> {
        let record = &self.manifest.shards[shard];
        let path = self.index_path(record);
        let len = index::HEADER_BYTES + record.documents as usize * index::ENTRY_BYTES;
        let window = Window::open(&path, 0, len).map_err(CacheError::io("map", &path))?;
        // Fits: the header was compared, which has 31 bits for it.
        let tokens = record.tokens as u32;
        Index::new(&window, record.documents, tokens)
            .map_err(|reason| CacheError::Damaged { path, reason })?;
        Ok(MappedIndex { window, tokens })
    }

    /// The tokens in `range`, which is not empty, of shard number `shard`.
    pub(crate) fn tokens(&self, shard: usize, range: Range<u64>) -> Result<MappedIds, CacheError> {
        let path = self.bin_path(&self.manifest.shards[shard]);
        let width = self.manifest.width;
        let offset = Header::BYTES as u64 + range.start * width.bytes() as u64;
        let len = (range.end - range.start) as usize * width.bytes();
        let window = Window::open(&path, offset, len).map_err(CacheError::io("map", &path))?;
        Ok(MappedIds { window, width })
    }

    fn bin_path(&self, shard: &ShardRecord) -> PathBuf {
        self.dir.join(format!("{}.bin", shard.name))
    }

    fn index_path(&self, shard: &ShardRecord) -> PathBuf {
        self.dir.join(format!("{}.idx", shard.name))
    }
}

/// Keeps a copy of the tokenizer in the cache.
pub(crate) fn save_tokenizer(dir: &Path, tokenizer: &Tokenizer) -> Result<(), CacheError> {
    let Some(json) = tokenizer.json() else {
        return Ok(());
    };
    let path = dir.join(TOKENIZER);
    crate::atomic::write(&path, json).map_err(CacheError::io("write", &path))
}

fn open(path: &Path) -> Result<File, CacheError> {
    File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CacheError::Missing { path: path.into() },
        _ => CacheError::io("read", path)(error),
    })
}

/// A shard's index in memory, as long as this lives.
pub(crate) struct MappedIndex {
    window: Window,
    tokens: u32,
}

impl MappedIndex {
    pub(crate) fn get(&self) -> Index<'_> {
        Index::of_entries(&self.window[index::HEADER_BYTES..], self.tokens)
    }
}

/// A run of tokens in memory, as long as this lives.
#[derive(Debug)]
pub(crate) struct MappedIds {
    window: Window,
    width: Width,
}

impl MappedIds {
    pub(crate) fn get(&self) -> Ids<'_> {
        Ids::new(&self.window, self.width)
    }
}
