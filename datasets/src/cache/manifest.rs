//! `manifest.json`: what a cache holds and what it was made of. Written last: a folder without it
//! is no cache.

use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::CacheError;
use crate::bin_file::Width;
use crate::hex;
use crate::source::Selection;
use crate::tokenizer::Tokenizer;

/// The format that this build reads and writes.
pub(crate) const VERSION: u32 = 1;

/// All about a cache but its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of the format.
    pub version: u32,
    /// What wrote it.
    pub writer: String,
    /// Names the inputs: a hash of the sources' names, sizes and times of change, the tokenizer
    /// and the settings.
    pub key: String,
    /// What made the tokens.
    pub tokenizer: TokenizerRecord,
    /// How the ids are stored.
    pub width: Width,
    /// Columns and filters.
    pub selection: Selection,
    /// The files read, in order.
    pub sources: Vec<SourceRecord>,
    /// What became of their records.
    pub counts: Counts,
    /// The shards in order.
    pub shards: Vec<ShardRecord>,
    /// SHA-256 of this file with these digits left out.
    pub sha256: String,
}

/// A tokenizer's identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerRecord {
    /// Its file's name, or `byte-level`.
    pub name: String,
    /// Of its file.
    pub sha256: String,
    /// One more than its largest id.
    pub vocab_size: usize,
    /// Stands before each document.
    pub bos: u32,
    /// Ends each document as a label; not stored.
    pub eos: u32,
}

impl TokenizerRecord {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        Self {
            name: tokenizer.name().into(),
            sha256: tokenizer.sha256().into(),
            vocab_size: tokenizer.vocab_size(),
            bos: tokenizer.bos(),
            eos: tokenizer.eos(),
        }
    }
}

/// A file that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// Its path, or its name on the hub.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Of the whole file.
    pub sha256: String,
}

/// What became of the records of all sources: `rows == nulls + empties + filtered + documents`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Records read.
    pub rows: u64,
    /// Without a text.
    pub nulls: u64,
    /// With a text of no letters.
    pub empties: u64,
    /// Left out by a filter.
    pub filtered: u64,
}

/// A shard: `NAME.bin` and `NAME.idx`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// The files' name without extension.
    pub name: String,
    /// Documents.
    pub documents: u64,
    /// Ids, each document's BOS included.
    pub tokens: u64,
    /// Bytes of the documents' texts.
    pub text_bytes: u64,
    /// The largest id.
    pub largest_token: u32,
    /// Of the token file.
    pub bin_sha256: String,
    /// Of the index file.
    pub idx_sha256: String,
}

impl Manifest {
    /// Documents of all shards.
    #[must_use]
    pub fn documents(&self) -> u64 {
        self.shards.iter().map(|shard| shard.documents).sum()
    }

    /// Ids of all shards, each document's BOS included.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.shards.iter().map(|shard| shard.tokens).sum()
    }

    /// Bytes of all documents' texts.
    #[must_use]
    pub fn text_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.text_bytes).sum()
    }

    /// A hash of all tokens and documents in order.
    #[must_use]
    pub fn content(&self) -> String {
        let mut hash = Sha256::new();
        for shard in &self.shards {
            hash.update(&shard.bin_sha256);
            hash.update(&shard.idx_sha256);
        }
        hex(&hash.finalize())
    }

    fn digest(&self) -> Result<String, serde_json::Error> {
        let unsigned = Self {
            sha256: String::new(),
            ..self.clone()
        };
        Ok(hex(&Sha256::digest(serde_json::to_vec_pretty(&unsigned)?)))
    }

    /// The file's bytes.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let signed = Self {
            sha256: self.digest()?,
            ..self.clone()
        };
        serde_json::to_vec_pretty(&signed)
    }

    pub(crate) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, CacheError> {
        let damaged = |reason: String| CacheError::Manifest {
            path: path.into(),
            reason,
        };
        /// What every version has.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } =
            serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        if version != VERSION {
            return Err(CacheError::Version {
                path: path.into(),
                found: version,
                expected: VERSION,
            });
        }
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        let digest = manifest
            .digest()
            .map_err(|error| damaged(error.to_string()))?;
        if digest != manifest.sha256 {
            return Err(damaged("its SHA-256 does not match".into()));
        }
        Ok(manifest)
    }
}
