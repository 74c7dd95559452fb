//! Parquet shards to packed rows of tokens.
//!
//! The path of a document, one module a step:
//!
//! 1. [`corpus`] writes the default shard from the sources of the dependencies pinned in Cargo.lock.
//! 2. [`shards`] reads the texts of Parquet shards, streaming.
//! 3. [`tokenizer`] turns a text into ids, and says how many bytes of the text each id stands for.
//! 4. [`pack`] lays documents into rows of T positions; no label crosses a document.
//! 5. [`loader`] splits train from validation by document, shuffles by seed and epoch, and resumes
//!    a stream of rows from a [`Position`] of two numbers.
//! 6. [`report`] prints the counts, so that nothing is dropped silently.

pub mod corpus;
pub mod loader;
pub mod pack;
pub mod report;
pub mod shards;
mod store;
pub mod tokenizer;

pub use corpus::{CorpusError, CorpusShard};
pub use loader::{Dataset, DatasetError, Identity, OpenOptions, Position, RowStream};
pub use pack::{IGNORE, PackReport, Row};
pub use report::DatasetReport;
pub use shards::{ShardError, ShardReader};
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
