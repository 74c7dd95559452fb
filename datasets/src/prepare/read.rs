//! The reading side: records of all sources in order, in batches.

use std::fs::File;
use std::sync::mpsc::SyncSender;

use super::{Cursor, PrepareError, PrepareOptions};
use crate::cache::{SourceRecord, digest};
use crate::source::{Content, Document, Place, Reader, SourceError, SourceFile, Vocabulary, hub};
use crate::tokenizer::Tokenizer;

/// Bytes of text in a batch, for each thread: enough that one long document does not keep the
/// other threads waiting, little enough that some batches fit in memory.
const BYTES_PER_THREAD: usize = 2 << 20;

/// Some documents and what surrounds them.
pub(super) struct Batch {
    pub(super) items: Vec<Item>,
    /// Files begun since the last batch, by number.
    pub(super) sources: Vec<(usize, SourceRecord)>,
    /// Behind the last record read.
    pub(super) end: Cursor,
    /// Of all sources, how much is read, of 1.
    pub(super) share: f64,
}

/// A document.
pub(super) struct Item {
    pub(super) document: Document,
    /// Where its record stands.
    pub(super) at: Cursor,
}

/// Sends all records from `start` on, then hangs up. Ends early if nobody listens any more.
pub(super) fn read(
    files: &[SourceFile],
    start: Cursor,
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    sender: &SyncSender<Result<Batch, PrepareError>>,
) {
    let reading = Reading {
        files,
        tokenizer,
        options,
        sender,
        weights: weights(files),
        bytes: 0,
        batch: Batch {
            items: Vec::new(),
            sources: Vec::new(),
            end: start,
            share: 0.0,
        },
    };
    if let Err(Stop::Failed(error)) = reading.run() {
        // If nobody listens, somebody else failed first.
        let _ = sender.send(Err(error));
    }
}

enum Stop {
    Failed(PrepareError),
    NobodyListens,
}

impl<E: Into<PrepareError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

struct Reading<'a> {
    files: &'a [SourceFile],
    tokenizer: &'a Tokenizer,
    options: &'a PrepareOptions,
    sender: &'a SyncSender<Result<Batch, PrepareError>>,
    /// Shares of the files in all sources.
    weights: Vec<f64>,
    /// Of the batch.
    bytes: usize,
    batch: Batch,
}

impl Reading<'_> {
    fn run(mut self) -> Result<(), Stop> {
        let limit = BYTES_PER_THREAD * rayon::current_num_threads();
        for number in self.batch.end.source..self.files.len() {
            if number > self.batch.end.source {
                self.batch.end.source = number;
                self.batch.end.record = 0;
            }
            let mut reader = self.begin(number)?;
            while let Some(content) = reader.next() {
                self.count(content?);
                if self.bytes >= limit {
                    let before: f64 = self.weights[..number].iter().sum();
                    self.send(before + self.weights[number] * reader.share())?;
                }
            }
        }
        self.send(1.0)
    }

    fn begin(&mut self, number: usize) -> Result<Reader, PrepareError> {
        let file = &self.files[number];
        let path = file.fetch(&self.options.hub).map_err(SourceError::from)?;
        let io = |source| SourceError::Io {
            path: path.clone(),
            source,
        };
        let mut opened = File::open(&path).map_err(io)?;
        let record = SourceRecord {
            name: file.name(),
            bytes: opened.metadata().map_err(io)?.len(),
            sha256: digest(&mut opened).map_err(io)?,
        };
        if let Place::Hub(_) = file.place {
            hub::check_sha256(&path, &record.sha256).map_err(SourceError::from)?;
        }
        self.batch.sources.push((number, record));
        let vocabulary = Vocabulary {
            tokenizer: self.tokenizer.name(),
            size: self.tokenizer.vocab_size(),
            bos: self.tokenizer.bos(),
        };
        Ok(Reader::open(
            self.files,
            number,
            &path,
            self.batch.end.record,
            &self.options.selection,
            vocabulary,
            &self.options.hub,
        )?)
    }

    fn count(&mut self, content: Content) {
        let at = self.batch.end;
        let end = &mut self.batch.end;
        end.record += 1;
        end.counts.rows += 1;
        match content {
            Content::Null => end.counts.nulls += 1,
            Content::Filtered => end.counts.filtered += 1,
            Content::Document(document) if document.size() == 0 => end.counts.empties += 1,
            Content::Document(document) => {
                self.bytes += document.size();
                self.batch.items.push(Item { document, at });
            }
        }
    }

    fn send(&mut self, share: f64) -> Result<(), Stop> {
        let next = Batch {
            items: Vec::new(),
            sources: Vec::new(),
            ..self.batch
        };
        let batch = Batch {
            share,
            ..std::mem::replace(&mut self.batch, next)
        };
        self.bytes = 0;
        self.sender.send(Ok(batch)).map_err(|_| Stop::NobodyListens)
    }
}

/// By size, or all equal where a size is not known before the file is fetched.
fn weights(files: &[SourceFile]) -> Vec<f64> {
    let size = |file: &SourceFile| match &file.place {
        Place::Local(path) => Some(std::fs::metadata(path).ok()?.len() as f64),
        Place::Hub(_) => None,
    };
    let sizes: Option<Vec<f64>> = files.iter().map(size).collect();
    let sizes = sizes.unwrap_or_else(|| vec![1.0; files.len()]);
    let total = sizes.iter().sum::<f64>().max(1.0);
    sizes.into_iter().map(|size| size / total).collect()
}
