//! The default corpus: text that every machine that builds this project has already.
//!
//! The Markdown and Rust sources of the registry packages pinned in Cargo.lock, one file one
//! document, as a Parquet shard with FineWeb-Edu's columns. The lock file alone decides the
//! shard's bytes: which packages, and with the rule of `select.rs` which of their files. The shard
//! is named by the hash of that, so it is made once, then reused, also without network or cargo.

mod lock;
mod select;
mod write;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Why the corpus cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// No Cargo.lock at or above the folder.
    #[error("no Cargo.lock in {} or above it; run this in a checkout of the project", start.display())]
    NoLock {
        /// Where the search began.
        start: PathBuf,
    },
    /// Cargo.lock is not one.
    #[error("cannot understand {}: {reason}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Cargo cannot tell where the packages are.
    #[error(
        "cargo cannot list the dependencies' sources; run `cargo fetch --locked` once with \
             network: {reason}"
    )]
    Cargo {
        /// What cargo said.
        reason: String,
    },
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write` ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The shard cannot be encoded.
    #[error("cannot write the corpus {}: {reason}", path.display())]
    Write {
        /// The shard.
        path: PathBuf,
        /// What the encoder said.
        reason: String,
    },
    /// Not one document was found.
    #[error("none of the {packages} packages pinned in {} has Markdown or Rust sources", lock.display())]
    Nothing {
        /// The lock file.
        lock: PathBuf,
        /// Registry packages in it.
        packages: usize,
    },
}

/// Files left out, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Longer than 64 KiB; mostly generated tables.
    pub too_long: u64,
    /// Nothing but white space.
    pub blank: u64,
    /// Text or name that is not UTF-8.
    pub not_utf8: u64,
    /// The same text as an earlier file.
    pub repeated: u64,
    /// The package has its share already.
    pub beyond_package: u64,
    /// The corpus is large enough.
    pub beyond_budget: u64,
}

/// What a corpus holds; stored in the shard's footer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Files taken.
    pub documents: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The bytes of Markdown among them.
    pub markdown_bytes: u64,
    /// The bytes of Rust among them.
    pub rust_bytes: u64,
    /// Packages that files were chosen from.
    pub packages: u64,
    /// Files left out.
    pub skipped: Skipped,
}

/// A corpus on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorpusShard {
    /// The Parquet file.
    pub path: PathBuf,
    /// What it holds.
    pub summary: Summary,
    /// It was there already.
    pub reused: bool,
}

/// Builds the corpus of the Cargo.lock at or above `manifest_dir` into `cache_dir`, or finds it
/// there. Safe when several processes build at once: each writes a temporary file and renames it,
/// and all write the same bytes.
///
/// # Errors
/// [`CorpusError`]. `cargo metadata` runs offline first and only then, if packages are missing,
/// with network.
pub fn build(manifest_dir: &Path, cache_dir: &Path) -> Result<CorpusShard, CorpusError> {
    let lock = lock::Lock::find(manifest_dir)?;
    let path = cache_dir.join(format!("corpus-{}.parquet", &lock.identity[..16]));
    // A file that does not read back as a corpus is damaged; it is built again.
    if let Some(summary) = write::read_summary(&path) {
        return Ok(CorpusShard {
            path,
            summary,
            reused: true,
        });
    }
    let (documents, summary) = select::select(&lock.sources()?)?;
    if documents.is_empty() {
        return Err(CorpusError::Nothing {
            lock: lock.path,
            packages: lock.packages.len(),
        });
    }
    write::write(&path, &lock.identity, &documents, &summary)?;
    Ok(CorpusShard {
        path,
        summary,
        reused: false,
    })
}
