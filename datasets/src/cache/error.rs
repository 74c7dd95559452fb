//! What can be wrong with a cache.

use std::io;
use std::path::{Path, PathBuf};

use crate::bin_file::BinError;

/// Why a cache cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A file or folder.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write` ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space left to write {}; free some and prepare again, which goes on after the last \
             whole shard", path.display())]
    DiskFull {
        /// The file.
        path: PathBuf,
    },
    /// The folder is no cache.
    #[error("{} is no token cache: it has no manifest.json; `cargo xtask data prepare` makes one", path.display())]
    NotACache {
        /// The folder.
        path: PathBuf,
    },
    /// The preparation did not come to its end.
    #[error("the token cache {} is not finished; run the same `data prepare` again, which goes on \
             where it stopped", path.display())]
    Unfinished {
        /// The folder.
        path: PathBuf,
    },
    /// The manifest cannot be trusted.
    #[error("{} is damaged: {reason}; remove the folder and prepare again", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another program's format.
    #[error("{} has version {found}, this program reads {expected}; \
             remove the folder and prepare again", path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// This program's.
        expected: u32,
    },
    /// A file of a shard is gone.
    #[error("{} is missing from its cache; restore it, or remove the folder and prepare again", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A shard's token file is not as its header says.
    #[error("a shard of the cache is damaged; restore it, or remove the folder and prepare again")]
    Bin(#[from] BinError),
    /// A file of a shard is not what the manifest says.
    #[error("{} is damaged: {reason}; restore it, or remove the folder and prepare again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The cache was made with another tokenizer.
    #[error("the token cache {} was made with the tokenizer {expected}, not with {found}; give \
             that one, or prepare another cache", path.display())]
    Tokenizer {
        /// The cache.
        path: PathBuf,
        /// Name and SHA-256 of the cache's.
        expected: String,
        /// Name and SHA-256 of the one given.
        found: String,
    },
    /// Another process writes here.
    #[error("another process prepares {}; wait for its end, or give another folder", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds a cache of other inputs.
    #[error("{} holds a token cache of other inputs ({what}); give another folder, or remove it", path.display())]
    OtherInputs {
        /// The folder.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// A document has more tokens than a shard can count, or more bytes than an index.
    #[error(
        "{source_name} has a document of {tokens} tokens and {bytes} bytes, more than a shard \
             can hold; leave it out or split it"
    )]
    DocumentTooLong {
        /// Where it is.
        source_name: String,
        /// Its tokens.
        tokens: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// The sources hold nothing.
    #[error(
        "the sources hold no document ({rows} records: {nulls} without text, {empties} empty, \
             {filtered} filtered out)"
    )]
    NoDocuments {
        /// Records read.
        rows: u64,
        /// Without a text.
        nulls: u64,
        /// With an empty one.
        empties: u64,
        /// Left out by filters.
        filtered: u64,
    },
}

impl CacheError {
    /// Adds what was done to what to an error of the operating system.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            _ => Self::Io {
                action,
                path,
                source,
            },
        }
    }
}
