//! Documents as people have them to packed rows of tokens.
//!
//! The path of a document, one module a step:
//!
//! 1. [`corpus`] writes the default shard from the sources of the dependencies pinned in Cargo.lock.
//! 2. [`source`] reads the texts of Parquet and JSON lines and the tokens of `.bin` files, from
//!    this machine or the hub.
//! 3. [`tokenizer`] turns a text into ids.
//! 4. [`mod@prepare`] writes them into a [`cache`], in parallel, resumable after a kill.
//! 5. [`shuffle`] mixes documents by seed and epoch, a group of blocks at a time.
//! 6. [`pack`] lays documents into rows of T positions; no label crosses a document.
//! 7. [`loader`] splits train from validation by document, and [`stream`] gives each rank its rows
//!    and resumes from a [`Position`] of two numbers.
//! 8. [`report`] and [`stats`] count, so that nothing is dropped silently.

mod atomic;
pub mod bin_file;
pub mod cache;
pub mod corpus;
mod group;
pub mod loader;
mod options;
pub mod pack;
pub mod prepare;
mod progress;
pub mod report;
mod row;
pub mod shuffle;
pub mod source;
pub mod stats;
pub mod stream;
pub mod tokenizer;

pub use cache::{Cache, CacheError};
pub use corpus::{CorpusError, CorpusShard};
pub use group::RowPart;
pub use loader::Dataset;
pub use options::{DatasetError, Identity, OpenOptions};
pub use pack::{PackReport, Packing};
pub use prepare::{PrepareError, PrepareOptions, Progress, prepare};
pub use progress::ProgressLine;
pub use report::DatasetReport;
pub use row::{IGNORE, Row};
pub use shuffle::Shuffle;
pub use source::{Columns, Filters, Hub, ParquetError, ParquetReader, Selection, SourceError};
pub use stream::{EpochRows, Position, PrefetchedRows, RowStream, Share};
pub use tokenizer::{SpecialIds, Tokenizer, TokenizerError};

/// Lower-case hexadecimal digits of a digest.
fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}
