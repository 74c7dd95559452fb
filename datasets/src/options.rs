//! How documents become rows, and what a run must not change.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cache::CacheError;
use crate::pack::Packing;
use crate::prepare::PrepareError;
use crate::shuffle::Shuffle;
use crate::source::{Hub, Selection};
use crate::tokenizer::TokenizerError;

/// Why a dataset cannot be opened or resumed.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The cache cannot be made.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The cache cannot be read.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The cache's copy of the tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A setting is outside its range.
    #[error("{name} = {value} is out of range: {expected}")]
    Option {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What may be given.
        expected: &'static str,
    },
    /// A split does not even fill one row.
    #[error(
        "the {split} documents ({documents}, {tokens} tokens with EOS) do not fill one row of \
             {row_tokens}; {remedy}"
    )]
    TooSmall {
        /// `training` or `validation`.
        split: &'static str,
        /// Documents in the split.
        documents: usize,
        /// Their tokens, each document's EOS included.
        tokens: usize,
        /// T.
        row_tokens: usize,
        /// What to change.
        remedy: &'static str,
    },
    /// The position lies beyond the end of its epoch.
    #[error(
        "cannot resume at row {row} of epoch {epoch}, which has {rows} rows; the position is \
             of another dataset or other settings"
    )]
    PositionBeyondEpoch {
        /// The position's epoch.
        epoch: u64,
        /// The position's row.
        row: u64,
        /// Rows that the epoch has.
        rows: u64,
    },
    /// A run would continue on other data.
    #[error("cannot resume: {name} is {found}, the run began with {expected}")]
    Changed {
        /// Which part of the identity.
        name: &'static str,
        /// At the run's start.
        expected: String,
        /// Now.
        found: String,
    },
    /// The model has fewer embeddings than the data has ids.
    #[error(
        "the data holds token id {largest}, but the model's vocabulary has {vocab_size} ids; \
             set the vocabulary to the tokenizer's {needed}"
    )]
    Vocabulary {
        /// The largest id in the data, BOS, EOS and padding included.
        largest: u32,
        /// The model's.
        vocab_size: usize,
        /// The tokenizer's.
        needed: usize,
    },
}

/// How documents become rows.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// T, the positions of a row; at least 1.
    pub row_tokens: usize,
    /// Seed of the shuffles. It does not move documents between the splits.
    pub seed: u64,
    /// Share of the documents held out, in 0..1; 0 holds none out.
    pub validation_fraction: f64,
    /// How documents are laid into rows.
    pub packing: Packing,
    /// How widely training documents are mixed.
    pub shuffle: Shuffle,
    /// What is read of the sources.
    pub selection: Selection,
    /// The folder in which sources that are no cache themselves get one.
    pub cache_dir: PathBuf,
    /// Where `hf://` sources come from.
    pub hub: Hub,
}

impl OpenOptions {
    /// FineWeb-Edu's columns, one document in twenty held out, seed 0, best fit, caches in
    /// `target/tokens`.
    #[must_use]
    pub fn new(row_tokens: usize) -> Self {
        Self {
            row_tokens,
            seed: 0,
            validation_fraction: 0.05,
            packing: Packing::default(),
            shuffle: Shuffle::default(),
            selection: Selection::default(),
            cache_dir: "target/tokens".into(),
            hub: Hub::from_env(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), DatasetError> {
        let Shuffle {
            block_tokens,
            blocks,
        } = self.shuffle;
        let at_least_one = [
            ("row_tokens", self.row_tokens),
            ("shuffle.block_tokens", block_tokens as usize),
            ("shuffle.blocks", blocks as usize),
        ];
        if let Some((name, _)) = at_least_one.into_iter().find(|(_, value)| *value == 0) {
            return Err(DatasetError::Option {
                name,
                value: "0".into(),
                expected: "at least 1",
            });
        }
        if !(0.0..1.0).contains(&self.validation_fraction) {
            return Err(DatasetError::Option {
                name: "validation_fraction",
                value: self.validation_fraction.to_string(),
                expected: "from 0 up to, but not, 1",
            });
        }
        Ok(())
    }
}

/// Everything that the stream of rows depends on. Save it with a checkpoint and compare with
/// [`Identity::check`] before resuming.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// SHA-256 over all shards of the cache, in hexadecimal.
    pub texts: String,
    /// SHA-256 of the tokenizer.
    pub tokenizer: String,
    /// BOS id.
    pub bos: u32,
    /// EOS id.
    pub eos: u32,
    /// T.
    pub row_tokens: usize,
    /// Seed of the shuffles.
    pub seed: u64,
    /// Share of documents held out.
    pub validation_fraction: f64,
    /// How documents are laid into rows.
    pub packing: Packing,
    /// How widely documents are mixed.
    pub shuffle: Shuffle,
}

impl Identity {
    /// Refuses to continue a run that began with `saved` on this dataset.
    ///
    /// # Errors
    /// [`DatasetError::Changed`] naming the first part that differs.
    pub fn check(&self, saved: &Identity) -> Result<(), DatasetError> {
        let parts = |identity: &Identity| {
            [
                (
                    "the text of the data (SHA-256 of its tokens)",
                    identity.texts.clone(),
                ),
                ("the tokenizer (SHA-256)", identity.tokenizer.clone()),
                ("the BOS id", identity.bos.to_string()),
                ("the EOS id", identity.eos.to_string()),
                ("row_tokens", identity.row_tokens.to_string()),
                ("the data seed", identity.seed.to_string()),
                (
                    "validation_fraction",
                    identity.validation_fraction.to_string(),
                ),
                ("packing", identity.packing.to_string()),
                (
                    "shuffle.block_tokens",
                    identity.shuffle.block_tokens.to_string(),
                ),
                ("shuffle.blocks", identity.shuffle.blocks.to_string()),
            ]
        };
        for ((name, expected), (_, found)) in parts(saved).into_iter().zip(parts(self)) {
            if expected != found {
                return Err(DatasetError::Changed {
                    name,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}
