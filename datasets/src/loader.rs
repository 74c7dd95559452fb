//! Documents in memory, split for validation, and endless resumable streams of training rows.

use std::path::PathBuf;
use std::sync::Arc;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::hex;
use crate::pack::{PackReport, Packer, Piece, Row};
use crate::report::DatasetReport;
use crate::shards::{self, Columns, ShardError, ShardReader};
use crate::store::TokenStore;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Text that is tokenised at once, so that the texts themselves need little memory.
const BATCH_BYTES: usize = 4 << 20;

/// Why a dataset cannot be opened or resumed.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// A shard cannot be read.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A text cannot be tokenised.
    #[error("{}: {source}", path.display())]
    Tokenizer {
        /// The shard being read.
        path: PathBuf,
        /// What the tokenizer said.
        source: TokenizerError,
    },
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
    /// The shards' columns.
    pub columns: Columns,
}

impl OpenOptions {
    /// FineWeb-Edu's columns, one document in twenty held out, seed 0.
    #[must_use]
    pub fn new(row_tokens: usize) -> Self {
        Self {
            row_tokens,
            seed: 0,
            validation_fraction: 0.05,
            columns: Columns::default(),
        }
    }

    fn check(&self) -> Result<(), DatasetError> {
        if self.row_tokens == 0 {
            let (value, expected) = ("0".into(), "a row has at least one token");
            return Err(DatasetError::Option {
                name: "row_tokens",
                value,
                expected,
            });
        }
        if !(0.0..1.0).contains(&self.validation_fraction) {
            let value = self.validation_fraction.to_string();
            let expected = "from 0 up to, but not, 1";
            return Err(DatasetError::Option {
                name: "validation_fraction",
                value,
                expected,
            });
        }
        Ok(())
    }
}

/// Where a stream of training rows stands: the next row it gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Position {
    /// Passes over the training documents completed before.
    pub epoch: u64,
    /// Rows of this epoch given before.
    pub row: u64,
}

/// Everything that the stream of rows depends on. Save it with a checkpoint and compare with
/// [`Identity::check`] before resuming.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// SHA-256 over all texts in order, in hexadecimal.
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
}

impl Identity {
    /// Refuses to continue a run that began with `saved` on this dataset.
    ///
    /// # Errors
    /// [`DatasetError::Changed`] naming the first part that differs.
    pub fn check(&self, saved: &Identity) -> Result<(), DatasetError> {
        let parts = |identity: &Identity| {
            [
                ("the text of the data (SHA-256)", identity.texts.clone()),
                ("the tokenizer (SHA-256)", identity.tokenizer.clone()),
                ("the BOS id", identity.bos.to_string()),
                ("the EOS id", identity.eos.to_string()),
                ("row_tokens", identity.row_tokens.to_string()),
                ("the data seed", identity.seed.to_string()),
                (
                    "validation_fraction",
                    identity.validation_fraction.to_string(),
                ),
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

/// How far [`Dataset::open_with`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenProgress {
    /// Rows tokenised so far, skipped ones included.
    pub rows: u64,
    /// Rows in all shards.
    pub total_rows: u64,
}

/// Tokenised documents of all shards. Cheap to clone.
#[derive(Clone)]
pub struct Dataset(Arc<Inner>);

struct Inner {
    train: TokenStore,
    validation: TokenStore,
    tokenizer: Tokenizer,
    options: OpenOptions,
    identity: Identity,
    report: DatasetReport,
}

impl Dataset {
    /// Reads, tokenises and splits all documents of `paths`: Parquet files or folders of them.
    ///
    /// A document is held out by the SHA-256 of its text, never by its place, so equal texts are
    /// always in the same split, whatever shards come and go.
    ///
    /// # Errors
    /// Any [`DatasetError`] but the last three. A validation split that does not fill a row is an
    /// error unless `validation_fraction` is 0.
    pub fn open(
        paths: &[PathBuf],
        tokenizer: Tokenizer,
        options: OpenOptions,
    ) -> Result<Self, DatasetError> {
        Self::open_with(paths, tokenizer, options, |_| {})
    }

    /// As [`Dataset::open`], telling how far it has come.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn open_with(
        paths: &[PathBuf],
        tokenizer: Tokenizer,
        options: OpenOptions,
        mut progress: impl FnMut(OpenProgress),
    ) -> Result<Self, DatasetError> {
        options.check()?;
        let shards = shards::list(paths)?;
        let mut readers = Vec::with_capacity(shards.len());
        // All are opened first: a bad shard shows before the others are tokenised.
        for path in &shards {
            readers.push((path, ShardReader::open(path, &options.columns)?));
        }
        let total_rows = readers
            .iter()
            .map(|(_, reader)| reader.expected_rows())
            .sum();
        let mut splitter = Splitter::new(options.validation_fraction);
        let mut report = DatasetReport::new(&tokenizer, &options, shards.len());
        for (path, reader) in readers {
            let failed = |source| DatasetError::Tokenizer {
                path: path.clone(),
                source,
            };
            let (mut texts, mut bytes) = (Vec::new(), 0);
            for record in reader {
                report.rows += 1;
                match record?.text {
                    None => report.nulls += 1,
                    Some(text) if text.is_empty() => report.empties += 1,
                    Some(text) => {
                        bytes += text.len();
                        texts.push(text);
                    }
                }
                if bytes >= BATCH_BYTES {
                    splitter.take(&texts, &tokenizer).map_err(failed)?;
                    (texts, bytes) = (Vec::new(), 0);
                    progress(OpenProgress {
                        rows: report.rows,
                        total_rows,
                    });
                }
            }
            splitter.take(&texts, &tokenizer).map_err(failed)?;
            progress(OpenProgress {
                rows: report.rows,
                total_rows,
            });
        }
        Self::assemble(splitter, tokenizer, options, report)
    }

    fn assemble(
        splitter: Splitter,
        tokenizer: Tokenizer,
        options: OpenOptions,
        mut report: DatasetReport,
    ) -> Result<Self, DatasetError> {
        let Splitter {
            train,
            validation,
            texts,
            ..
        } = splitter;
        check_size("training", &train, options.row_tokens)?;
        if options.validation_fraction > 0.0 {
            check_size("validation", &validation, options.row_tokens)?;
        }
        report.train = pack_report(
            &train,
            &shuffled(&train, &mut epoch_rng(options.seed, 0)),
            options.row_tokens,
        );
        report.validation = pack_report(&validation, &in_order(&validation), options.row_tokens);
        let identity = Identity {
            texts: hex(&texts.finalize()),
            tokenizer: tokenizer.sha256().to_owned(),
            bos: tokenizer.bos(),
            eos: tokenizer.eos(),
            row_tokens: options.row_tokens,
            seed: options.seed,
            validation_fraction: options.validation_fraction,
        };
        Ok(Self(Arc::new(Inner {
            train,
            validation,
            tokenizer,
            options,
            identity,
            report,
        })))
    }

    /// Endless training rows from the first row of epoch 0.
    #[must_use]
    pub fn stream(&self) -> RowStream {
        RowStream::at_epoch(self.clone(), 0)
    }

    /// Endless training rows that go on exactly where a stream with this position stood.
    ///
    /// # Errors
    /// [`DatasetError::PositionBeyondEpoch`].
    pub fn stream_from(&self, position: Position) -> Result<RowStream, DatasetError> {
        let mut stream = RowStream::at_epoch(self.clone(), position.epoch);
        let rows = stream.rows.len() as u64;
        if rows < position.row {
            let Position { epoch, row } = position;
            return Err(DatasetError::PositionBeyondEpoch { epoch, row, rows });
        }
        stream.position = position;
        Ok(stream)
    }

    /// The training rows of an epoch in the order of packing, in which a document longer than a
    /// row goes on in the next one. A stream gives the same rows in shuffled order.
    pub fn packed_rows(&self, epoch: u64) -> impl Iterator<Item = Row> + '_ {
        let Inner { train, options, .. } = &*self.0;
        let order = shuffled(train, &mut epoch_rng(options.seed, epoch));
        Packer::new(order.into_iter(), options.row_tokens).map(|pieces| self.training_row(&pieces))
    }

    fn training_row(&self, pieces: &[Piece]) -> Row {
        let Inner {
            train,
            tokenizer,
            options,
            ..
        } = &*self.0;
        Row::assemble(pieces, options.row_tokens, train, tokenizer)
    }

    /// The validation rows, the same ones in the same order every time.
    pub fn validation_rows(&self) -> impl Iterator<Item = Row> + '_ {
        let Inner {
            validation,
            tokenizer,
            options,
            ..
        } = &*self.0;
        Packer::new(in_order(validation).into_iter(), options.row_tokens)
            .map(|pieces| Row::assemble(&pieces, options.row_tokens, validation, tokenizer))
    }

    /// Counts of everything read, packed and skipped. Training rows are those of epoch 0; another
    /// shuffle may pad a little more or less.
    #[must_use]
    pub fn report(&self) -> &DatasetReport {
        &self.0.report
    }

    /// What the rows depend on.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// The tokenizer the documents went through.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.0.tokenizer
    }

    /// Refuses a model whose embedding does not cover every id in the rows.
    ///
    /// # Errors
    /// [`DatasetError::Vocabulary`].
    pub fn check_vocabulary(&self, vocab_size: usize) -> Result<(), DatasetError> {
        let Inner {
            train,
            validation,
            tokenizer,
            ..
        } = &*self.0;
        let control = [tokenizer.bos(), tokenizer.eos(), tokenizer.pad()];
        let texts = [train.largest_token(), validation.largest_token()];
        let largest = control.into_iter().chain(texts).max().unwrap_or(0);
        if largest as usize >= vocab_size {
            let needed = tokenizer.vocab_size();
            return Err(DatasetError::Vocabulary {
                largest,
                vocab_size,
                needed,
            });
        }
        Ok(())
    }
}

/// Endless training rows, each epoch in its own shuffled order.
///
/// Documents are shuffled before they are packed and rows after it: a long document fills many
/// rows one after another, which would make poor neighbours in a batch. Memory for an epoch's order
/// is a few dozen bytes a piece.
pub struct RowStream {
    dataset: Dataset,
    position: Position,
    rows: Vec<Vec<Piece>>,
}

impl RowStream {
    fn at_epoch(dataset: Dataset, epoch: u64) -> Self {
        let Inner { train, options, .. } = &*dataset.0;
        let mut rng = epoch_rng(options.seed, epoch);
        let order = shuffled(train, &mut rng);
        let mut rows: Vec<_> = Packer::new(order.into_iter(), options.row_tokens).collect();
        rows.shuffle(&mut rng);
        Self {
            position: Position { epoch, row: 0 },
            rows,
            dataset,
        }
    }

    /// The next row's position: save it, and [`Dataset::stream_from`] goes on with that row.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }
}

impl Iterator for RowStream {
    type Item = Row;

    /// Never `None`: an open dataset has training documents.
    fn next(&mut self) -> Option<Row> {
        if self.position.row as usize == self.rows.len() {
            *self = Self::at_epoch(self.dataset.clone(), self.position.epoch + 1);
        }
        let pieces = self.rows.get(self.position.row as usize)?;
        self.position.row += 1;
        Some(self.dataset.training_row(pieces))
    }
}

/// Sorts texts into the splits as they come.
struct Splitter {
    /// A text is held out if its hash, as a 53-bit number, is below this.
    below: u64,
    train: TokenStore,
    validation: TokenStore,
    texts: Sha256,
}

impl Splitter {
    fn new(validation_fraction: f64) -> Self {
        Self {
            below: (validation_fraction * (1u64 << 53) as f64) as u64,
            train: TokenStore::default(),
            validation: TokenStore::default(),
            texts: Sha256::new(),
        }
    }

    fn take(&mut self, texts: &[String], tokenizer: &Tokenizer) -> Result<(), TokenizerError> {
        for (text, encoded) in texts.iter().zip(tokenizer.encode_batch(texts)?) {
            let digest = Sha256::digest(text);
            self.texts.update(digest);
            let mut hash = [0; 8];
            hash.copy_from_slice(&digest[..8]);
            let held_out = u64::from_be_bytes(hash) >> 11 < self.below;
            if held_out {
                &mut self.validation
            } else {
                &mut self.train
            }
            .push(&encoded);
        }
        Ok(())
    }
}

fn in_order(store: &TokenStore) -> Vec<(usize, usize)> {
    (0..store.len())
        .map(|document| (document, store.labels_of(document)))
        .collect()
}

/// One stream of the generator per epoch: no two pairs of seed and epoch share an order, as
/// `seed + epoch` would.
fn epoch_rng(seed: u64, epoch: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(epoch);
    rng
}

fn shuffled(store: &TokenStore, rng: &mut ChaCha8Rng) -> Vec<(usize, usize)> {
    let mut order = in_order(store);
    order.shuffle(rng);
    order
}

fn pack_report(store: &TokenStore, order: &[(usize, usize)], row_tokens: usize) -> PackReport {
    let mut report = PackReport::default();
    for pieces in Packer::new(order.iter().copied(), row_tokens) {
        report.add(&pieces, row_tokens, store);
    }
    report
}

fn check_size(
    split: &'static str,
    store: &TokenStore,
    row_tokens: usize,
) -> Result<(), DatasetError> {
    if store.labels() >= row_tokens {
        return Ok(());
    }
    let remedy = match split {
        "validation" => "give more data, a larger validation_fraction or shorter rows",
        _ => "give more data, a smaller validation_fraction or shorter rows",
    };
    let (documents, tokens) = (store.len(), store.labels());
    Err(DatasetError::TooSmall {
        split,
        documents,
        tokens,
        row_tokens,
        remedy,
    })
}
