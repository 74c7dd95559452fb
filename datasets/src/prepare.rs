//! Sources to a token cache: read in one thread, tokenised in all, written in order.
//!
//! The cache depends on the sources, the tokenizer and the options alone, not on threads nor on how
//! often the preparation was killed: a shard ends at a document that only the documents before it
//! decide. After each shard a journal records which are whole and which record comes next; the same
//! call goes on from there. The manifest comes last and makes the folder a cache.

mod journal;
mod lock;
mod read;

use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::atomic;
use crate::bin_file::Width;
use crate::cache::{self, Cache, CacheError, Counts, Manifest, ShardWriter, TokenizerRecord};
use crate::source::{self, Document, Hub, Selection, SourceError, SourceFile};
use crate::tokenizer::{Tokenizer, TokenizerError};
use journal::{Cursor, Journal};
use lock::Lock;
use read::{Batch, Item};

/// Batches that wait to be tokenised while one is.
const BATCHES_AHEAD: usize = 2;

/// Why a cache cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A text.
    #[error("{name}: {source}")]
    Tokenizer {
        /// The source.
        name: String,
        /// What the tokenizer said.
        source: TokenizerError,
    },
}

/// How a cache is prepared.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// What is read of the sources.
    pub selection: Selection,
    /// Where `hf://` sources come from.
    pub hub: Hub,
    /// Tokens of a shard, which only a longer document exceeds.
    pub shard_tokens: u64,
    /// Wait for another process that prepares the same folder, instead of refusing.
    pub wait: bool,
    /// Make it anew, whatever the folder holds.
    pub rebuild: bool,
}

impl Default for PrepareOptions {
    /// Shards of 10^8 tokens, as llm.c's.
    fn default() -> Self {
        Self {
            selection: Selection::default(),
            hub: Hub::from_env(),
            shard_tokens: 100_000_000,
            wait: false,
            rebuild: false,
        }
    }
}

/// How far a preparation has come.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Documents tokenised.
    pub documents: u64,
    /// Their tokens, BOS included.
    pub tokens: u64,
    /// Bytes of their texts.
    pub text_bytes: u64,
    /// How much of the sources is done, of 1.
    pub share: f64,
}

/// Tokenises `sources` into the cache `dir`, or finds it there; goes on with what an earlier call
/// of the same inputs left.
///
/// # Errors
/// [`PrepareError`]; what is whole stays, and the same call goes on with it.
pub fn prepare(
    sources: &[PathBuf],
    tokenizer: &Tokenizer,
    dir: &Path,
    options: &PrepareOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Cache, PrepareError> {
    Inputs::new(sources, tokenizer, options)?.prepare(dir, progress)
}

/// What a cache is made of.
pub(crate) struct Inputs<'a> {
    files: Vec<SourceFile>,
    tokenizer: &'a Tokenizer,
    options: &'a PrepareOptions,
    /// Names them; a cache of the same key has the same tokens.
    pub(crate) key: String,
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(
        sources: &[PathBuf],
        tokenizer: &'a Tokenizer,
        options: &'a PrepareOptions,
    ) -> Result<Self, PrepareError> {
        let files = source::list(sources, &options.hub)?;
        Ok(Self {
            key: journal::key(&files, tokenizer, options)?,
            files,
            tokenizer,
            options,
        })
    }

    pub(crate) fn prepare(
        &self,
        dir: &Path,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Cache, PrepareError> {
        let Self {
            files,
            tokenizer,
            options,
            key,
        } = self;
        std::fs::create_dir_all(dir).map_err(CacheError::io("create", dir))?;
        let _lock = Lock::take(dir, options.wait)?;
        if options.rebuild {
            journal::remove_cache(dir)?;
        }
        match Cache::open(dir) {
            Ok(cache) if cache.manifest().key == *key => {
                Journal::remove(dir)?;
                return Ok(cache);
            }
            Ok(cache) => {
                let what = format!("{} sources", cache.manifest().sources.len());
                return Err(other_inputs(dir, what).into());
            }
            Err(CacheError::NotACache { .. } | CacheError::Unfinished { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let journal = match Journal::read(dir)? {
            Some(journal) if journal.key == *key => journal,
            Some(_) => return Err(other_inputs(dir, "unfinished".into()).into()),
            None => Journal::new(key.clone()),
        };
        atomic::remove_unfinished(dir).map_err(CacheError::io("clear", dir))?;
        cache::save_tokenizer(dir, tokenizer)?;

        let mut making = Making {
            dir,
            tokenizer,
            shard_tokens: options.shard_tokens,
            width: Width::for_vocabulary(tokenizer.vocab_size()),
            writer: None,
            progress: Progress {
                documents: journal.shards.iter().map(|shard| shard.documents).sum(),
                tokens: journal.shards.iter().map(|shard| shard.tokens).sum(),
                text_bytes: journal.shards.iter().map(|shard| shard.text_bytes).sum(),
                share: 0.0,
            },
            journal,
        };
        let start = making.journal.next;
        let end = std::thread::scope(|scope| -> Result<Cursor, PrepareError> {
            let (sender, batches) = sync_channel(BATCHES_AHEAD);
            scope.spawn(move || read::read(files, start, tokenizer, options, &sender));
            let mut end = start;
            for batch in batches {
                let batch = batch?;
                end = batch.end;
                making.take(batch, files)?;
                progress(making.progress);
            }
            Ok(end)
        })?;
        making.finish(end, options)
    }
}

fn other_inputs(dir: &Path, what: String) -> CacheError {
    CacheError::OtherInputs {
        path: dir.into(),
        what,
    }
}

/// A cache while it is made.
struct Making<'a> {
    dir: &'a Path,
    tokenizer: &'a Tokenizer,
    shard_tokens: u64,
    width: Width,
    /// The shard that is not whole yet.
    writer: Option<ShardWriter>,
    journal: Journal,
    progress: Progress,
}

/// A document ready to be written.
struct Tokenised {
    ids: Vec<u32>,
    text_bytes: u32,
    hash: u64,
}

impl Making<'_> {
    fn take(&mut self, batch: Batch, files: &[SourceFile]) -> Result<(), PrepareError> {
        for (number, record) in batch.sources {
            match self.journal.sources.get(number) {
                None => self.journal.sources.push(record),
                Some(before) if *before == record => {}
                Some(before) => {
                    let what = format!("{} has changed since", before.name);
                    return Err(other_inputs(self.dir, what).into());
                }
            }
        }
        let tokenised: Result<Vec<Tokenised>, PrepareError> = batch
            .items
            .par_iter()
            .map(|item| self.tokenise(item, files))
            .collect();
        for (item, document) in batch.items.iter().zip(tokenised?) {
            self.write(item.at, &document)?;
        }
        self.progress.share = batch.share;
        Ok(())
    }

    fn tokenise(&self, item: &Item, files: &[SourceFile]) -> Result<Tokenised, PrepareError> {
        let tokenizer = self.tokenizer;
        let name = || files[item.at.source].name();
        let failed = |source| PrepareError::Tokenizer {
            name: name(),
            source,
        };
        let decoded;
        let (text, ids) = match &item.document {
            Document::Text(text) => (text.as_str(), tokenizer.encode(text).map_err(failed)?),
            Document::Tokens(ids) => {
                // Some writers also end documents.
                let ids = ids.strip_suffix(&[tokenizer.eos()]).unwrap_or(ids);
                if let Some((id, problem)) = tokenizer.forbidden(ids) {
                    return Err(SourceError::BinTokenizer {
                        path: name().into(),
                        tokenizer: tokenizer.name().into(),
                        reason: format!("it holds id {id}, {problem}"),
                    }
                    .into());
                }
                decoded = tokenizer.decode(ids).map_err(failed)?;
                (decoded.as_str(), ids.to_vec())
            }
        };
        let too_long = || CacheError::DocumentTooLong {
            source_name: name(),
            tokens: ids.len() as u64,
            bytes: text.len() as u64,
        };
        if ids.len() as u64 >= ShardWriter::MAX_TOKENS {
            return Err(too_long().into());
        }
        let mut hash = [0; 8];
        hash.copy_from_slice(&Sha256::digest(text)[..8]);
        Ok(Tokenised {
            text_bytes: u32::try_from(text.len()).map_err(|_| too_long())?,
            hash: u64::from_be_bytes(hash),
            ids,
        })
    }

    /// Adds a document whose record stands at `at`, after closing the shard that it does not fit.
    fn write(&mut self, at: Cursor, document: &Tokenised) -> Result<(), CacheError> {
        let tokens = 1 + document.ids.len() as u64;
        let limit = self.shard_tokens.min(ShardWriter::MAX_TOKENS);
        let is_full = |writer: &mut ShardWriter| writer.tokens() + tokens > limit;
        if let Some(full) = self.writer.take_if(is_full) {
            self.journal.shards.push(full.finish()?);
            self.journal.next = at;
            self.journal.write(self.dir)?;
        }
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => {
                let number = self.journal.shards.len();
                none.insert(ShardWriter::create(self.dir, number, self.width)?)
            }
        };
        let Tokenised {
            ids,
            text_bytes,
            hash,
        } = document;
        writer.push(self.tokenizer.bos(), ids, *text_bytes, *hash)?;
        self.progress.documents += 1;
        self.progress.tokens += tokens;
        self.progress.text_bytes += u64::from(*text_bytes);
        Ok(())
    }

    fn finish(mut self, end: Cursor, options: &PrepareOptions) -> Result<Cache, PrepareError> {
        if let Some(last) = self.writer.take() {
            self.journal.shards.push(last.finish()?);
        }
        let Counts {
            rows,
            nulls,
            empties,
            filtered,
        } = end.counts;
        if self.journal.shards.is_empty() {
            return Err(CacheError::NoDocuments {
                rows,
                nulls,
                empties,
                filtered,
            }
            .into());
        }
        let manifest = Manifest {
            version: cache::VERSION,
            writer: concat!("datasets ", env!("CARGO_PKG_VERSION")).into(),
            key: self.journal.key,
            tokenizer: TokenizerRecord::of(self.tokenizer),
            width: self.width,
            selection: options.selection.clone(),
            sources: self.journal.sources,
            counts: end.counts,
            shards: self.journal.shards,
            sha256: String::new(),
        };
        let cache = Cache::publish(self.dir, manifest)?;
        Journal::remove(self.dir)?;
        Ok(cache)
    }
}
