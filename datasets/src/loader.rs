//! A cache as a dataset: split for validation, packed into rows.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use crate::cache::{Cache, CacheError};
use crate::group::{Document, Group, RowPart};
use crate::options::{DatasetError, Identity, OpenOptions};
use crate::pack::{PackReport, Packer, Piece};
use crate::prepare::{Inputs, PrepareOptions, Progress};
use crate::report::DatasetReport;
use crate::row::{Control, Part, Row};
use crate::shuffle::{self, Block};
use crate::stream::{self, EpochRows, Position, RowStream, Share};
use crate::tokenizer::Tokenizer;

/// Tokenised documents in a cache. Cheap to clone.
#[derive(Clone)]
pub struct Dataset(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) cache: Cache,
    pub(crate) options: OpenOptions,
    pub(crate) split: Split,
    tokenizer: Tokenizer,
    identity: Identity,
    report: DatasetReport,
    /// In the cache's order.
    validation: Vec<Held>,
}

/// Sorts documents into the splits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    /// A text is held out if its hash, as a 53-bit number, is below this.
    below: u64,
}

impl Split {
    fn new(validation_fraction: f64) -> Self {
        Self {
            below: (validation_fraction * (1u64 << 53) as f64) as u64,
        }
    }

    pub(crate) fn holds_out(self, hash: u64) -> bool {
        hash >> 11 < self.below
    }
}

/// A document held out.
#[derive(Clone, Copy, Debug)]
struct Held {
    shard: u32,
    start: u32,
    labels: u32,
    text_bytes: u32,
}

impl Dataset {
    /// Opens the token cache that `sources` names, or makes one of all documents of `sources`, if
    /// [`OpenOptions::cache_dir`] has none of them yet. [`crate::source::list`] tells what a source
    /// may be. Without a tokenizer, a cache's own or else the byte-level one.
    ///
    /// A document is held out by the SHA-256 of its text, never by its place, so equal texts are
    /// always in the same split, whatever files come and go.
    ///
    /// # Errors
    /// Any [`DatasetError`] but those about positions, other data and vocabularies. A validation
    /// split that does not fill a row is an error unless `validation_fraction` is 0.
    pub fn open(
        sources: &[PathBuf],
        tokenizer: impl Into<Option<Tokenizer>>,
        options: OpenOptions,
    ) -> Result<Self, DatasetError> {
        Self::open_with(sources, tokenizer, options, &mut |_| {})
    }

    /// As [`Dataset::open`], telling how far the making of the cache has come.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn open_with(
        sources: &[PathBuf],
        tokenizer: impl Into<Option<Tokenizer>>,
        options: OpenOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self, DatasetError> {
        options.check()?;
        let tokenizer = tokenizer.into();
        if let [dir] = sources
            && Cache::is_at(dir)
        {
            let cache = Cache::open(dir)?;
            if let Some(given) = &tokenizer {
                cache.check_tokenizer(given)?;
            }
            return Self::of_cache(cache, options);
        }
        let tokenizer = tokenizer.unwrap_or_else(Tokenizer::byte_level);
        let prepare_options = PrepareOptions {
            selection: options.selection.clone(),
            hub: options.hub.clone(),
            // Several ranks may ask for the same cache at once.
            wait: true,
            ..PrepareOptions::default()
        };
        let inputs = Inputs::new(sources, &tokenizer, &prepare_options)?;
        let dir = options.cache_dir.join(&inputs.key[..16]);
        let cache = inputs.prepare(&dir, progress)?;
        Self::of_cache(cache, options)
    }

    /// A dataset of a cache with its own tokenizer. Of the options, those about sources do not
    /// matter.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn of_cache(cache: Cache, options: OpenOptions) -> Result<Self, DatasetError> {
        options.check()?;
        let tokenizer = cache.tokenizer()?;
        cache.check_tokenizer(&tokenizer)?;
        let split = Split::new(options.validation_fraction);
        let identity = Identity {
            texts: cache.manifest().content(),
            tokenizer: tokenizer.sha256().to_owned(),
            bos: tokenizer.bos(),
            eos: tokenizer.eos(),
            row_tokens: options.row_tokens,
            seed: options.seed,
            validation_fraction: options.validation_fraction,
            packing: options.packing,
            shuffle: options.shuffle,
        };
        let mut inner = Inner {
            report: DatasetReport::new(cache.manifest(), &tokenizer, options.row_tokens),
            validation: held_out(&cache, split)?,
            cache,
            options,
            split,
            tokenizer,
            identity,
        };
        inner.report.train = inner.training_report()?;
        inner.check_size("training", &inner.report.train)?;
        inner.report.validation = inner.validation_report();
        if inner.options.validation_fraction > 0.0 {
            inner.check_size("validation", &inner.report.validation)?;
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Endless training rows from the first row of epoch 0.
    ///
    /// # Errors
    /// [`DatasetError::Cache`].
    pub fn stream(&self) -> Result<RowStream, DatasetError> {
        self.stream_from(Position::default())
    }

    /// Endless training rows that go on exactly where a stream with this position stood.
    ///
    /// # Errors
    /// [`DatasetError::PositionBeyondEpoch`], [`DatasetError::Cache`].
    pub fn stream_from(&self, position: Position) -> Result<RowStream, DatasetError> {
        self.stream_of(position, Share::default())
    }

    /// One rank's share of the endless training rows from `position` on. The ranks take the rows by
    /// turns, so they all have the same number, and a position says where all of them stand: a run
    /// goes on from it with any number of ranks.
    ///
    /// # Errors
    /// [`DatasetError::PositionBeyondEpoch`], [`DatasetError::Cache`]; [`DatasetError::Option`] for
    /// a rank that is none of the ranks.
    pub fn stream_of(&self, position: Position, share: Share) -> Result<RowStream, DatasetError> {
        RowStream::new(self.clone(), position, share)
    }

    /// One rank's share of an epoch's training rows. All ranks have the same number: where the
    /// rows do not suffice, the last ranks' last row
    /// is padding alone.
    ///
    /// # Errors
    /// As [`Dataset::stream_of`].
    pub fn epoch_rows(&self, epoch: u64, share: Share) -> Result<EpochRows, DatasetError> {
        EpochRows::new(self.clone(), epoch, share)
    }

    /// The training row at a position, and where each of its pieces comes from.
    ///
    /// # Errors
    /// As [`Dataset::stream_from`].
    pub fn row_with_parts(&self, position: Position) -> Result<(Row, Vec<RowPart>), DatasetError> {
        stream::row_with_parts(self.clone(), position)
    }

    /// The training rows of an epoch in the order of packing, in which a document longer than a
    /// row goes on in the next one. A stream gives the same rows in shuffled order.
    pub fn packed_rows(&self, epoch: u64) -> impl Iterator<Item = Result<Row, DatasetError>> + '_ {
        let inner = &*self.0;
        let groups = inner.groups(epoch).into_iter().enumerate();
        groups.flat_map(move |(number, blocks)| {
            let group = Group::load(inner, &blocks, epoch, number as u64);
            let (group, error) = match group {
                Ok(group) => (Some(group), None),
                Err(error) => (None, Some(Err(error.into()))),
            };
            let rows = group.into_iter().flat_map(move |group| {
                let order = group.packed().to_vec();
                order
                    .into_iter()
                    .map(move |pieces| group.row(inner, &pieces))
            });
            rows.chain(error)
        })
    }

    /// The validation rows, the same ones in the same order every time.
    pub fn validation_rows(&self) -> impl Iterator<Item = Result<Row, DatasetError>> + '_ {
        let inner = &*self.0;
        inner
            .packed_validation()
            .map(|pieces| inner.validation_row(&pieces))
    }

    /// At most `count` of the validation rows, evenly spread so that many documents are among them.
    /// Reads no others.
    ///
    /// # Errors
    /// [`DatasetError::Cache`].
    pub fn validation_sample(&self, count: usize) -> Result<Vec<Row>, DatasetError> {
        let inner = &*self.0;
        let all = inner.report.validation.rows as usize;
        let count = count.min(all);
        let mut wanted = (0..count).map(|i| i * all / count).peekable();
        let mut rows = Vec::with_capacity(count);
        for (number, pieces) in inner.packed_validation().enumerate() {
            if wanted.next_if_eq(&number).is_some() {
                rows.push(inner.validation_row(&pieces)?);
            }
        }
        Ok(rows)
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

    /// The cache's folder.
    #[must_use]
    pub fn cache_dir(&self) -> &Path {
        self.0.cache.dir()
    }

    /// Refuses a model whose embedding does not cover every id in the rows.
    ///
    /// # Errors
    /// [`DatasetError::Vocabulary`].
    pub fn check_vocabulary(&self, vocab_size: usize) -> Result<(), DatasetError> {
        let Inner {
            cache, tokenizer, ..
        } = &*self.0;
        let control = [tokenizer.bos(), tokenizer.eos(), tokenizer.pad()];
        let shards = cache.manifest().shards.iter();
        let texts = shards.map(|shard| shard.largest_token);
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

impl Inner {
    /// The groups of an epoch.
    pub(crate) fn groups(&self, epoch: u64) -> Vec<Vec<Block>> {
        let shuffle = self.options.shuffle;
        let blocks = shuffle::blocks(self.cache.manifest(), shuffle);
        shuffle::groups(blocks, shuffle, self.options.seed, epoch)
    }

    /// A row of these parts, after a look at its ids: one that the model has no embedding for
    /// would take down a GPU's context.
    pub(crate) fn assemble<'a>(
        &self,
        parts: impl ExactSizeIterator<Item = Part<'a>>,
    ) -> Result<Row, DatasetError> {
        let control = Control {
            bos: self.tokenizer.bos(),
            eos: self.tokenizer.eos(),
            pad: self.tokenizer.pad(),
        };
        let row = Row::assemble(parts, self.options.row_tokens, control);
        let largest = row.labels.iter().copied().fold(0, i64::max);
        if largest >= self.tokenizer.vocab_size() as i64 {
            return Err(CacheError::Damaged {
                path: self.cache.dir().into(),
                reason: format!(
                    "it holds id {largest}, the tokenizer has {}; `data check` finds the shard",
                    self.tokenizer.vocab_size()
                ),
            }
            .into());
        }
        Ok(row)
    }

    /// Rows of epoch 0, packed by all threads.
    fn training_report(&self) -> Result<PackReport, DatasetError> {
        let groups = self.groups(0);
        let reports = groups.par_iter().enumerate().map(|(number, blocks)| {
            let group = Group::plan(self, blocks, 0, number as u64)?;
            Ok(group.report(self.options.row_tokens))
        });
        let sum = |a: PackReport, b: PackReport| Ok(a.plus(&b));
        reports.try_reduce(PackReport::default, sum)
    }

    fn validation_report(&self) -> PackReport {
        let mut report = PackReport::default();
        for pieces in self.packed_validation() {
            report.add(&pieces, self.options.row_tokens, |document| {
                let held = self.validation[document];
                (u64::from(held.labels) - 1, held.text_bytes.into())
            });
        }
        report
    }

    fn packed_validation(&self) -> impl Iterator<Item = Vec<Piece>> {
        let documents = self.validation.iter().enumerate();
        let lengths = documents.map(|(number, held)| (number, held.labels));
        Packer::new(lengths, self.options.packing, self.options.row_tokens)
    }

    fn validation_row(&self, pieces: &[Piece]) -> Result<Row, DatasetError> {
        let map = |piece: &Piece| {
            let held = self.validation[piece.document];
            let start = u64::from(held.start);
            self.cache
                .tokens(held.shard as usize, start..start + u64::from(held.labels))
        };
        let mapped: Vec<_> = pieces.iter().map(map).collect::<Result<_, _>>()?;
        self.assemble(pieces.iter().zip(&mapped).map(|(&piece, ids)| Part {
            piece,
            ids: ids.get(),
            text_bytes: self.validation[piece.document].text_bytes,
        }))
    }

    fn check_size(&self, split: &'static str, report: &PackReport) -> Result<(), DatasetError> {
        let row_tokens = self.options.row_tokens;
        if report.labels >= row_tokens as u64 {
            return Ok(());
        }
        let remedy = match split {
            "validation" => "give more data, a larger validation_fraction or shorter rows",
            _ => "give more data, a smaller validation_fraction or shorter rows",
        };
        Err(DatasetError::TooSmall {
            split,
            documents: report.documents as usize,
            tokens: report.labels as usize,
            row_tokens,
            remedy,
        })
    }
}

/// The documents held out, in the cache's order.
fn held_out(cache: &Cache, split: Split) -> Result<Vec<Held>, CacheError> {
    let of_shard = |shard: usize| -> Result<Vec<Held>, CacheError> {
        let index = cache.index(shard)?;
        let documents = Document::all_of(index.get()).filter(|(_, hash)| split.holds_out(*hash));
        let held = |(document, _): (Document, u64)| Held {
            shard: shard as u32,
            start: document.start,
            labels: document.labels,
            text_bytes: document.text_bytes,
        };
        Ok(documents.map(held).collect())
    };
    let shards: Result<Vec<_>, _> = (0..cache.manifest().shards.len())
        .into_par_iter()
        .map(of_shard)
        .collect();
    Ok(shards?.concat())
}
