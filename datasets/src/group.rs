//! A group of blocks: its documents shuffled, packed, and read where they lie.

use std::ops::Range;

use rand::seq::SliceRandom;

use crate::cache::{CacheError, Index, MappedIds};
use crate::loader::Inner;
use crate::options::DatasetError;
use crate::pack::{PackReport, Packer, Piece};
use crate::row::{Part, Row};
use crate::shuffle::{self, Block};

/// A document of a shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Document {
    /// Where its BOS stands in the shard.
    pub(crate) start: u32,
    /// Ids with BOS, and as many labels with EOS.
    pub(crate) labels: u32,
    pub(crate) text_bytes: u32,
}

impl Document {
    /// The documents of an index, with their texts' hashes.
    pub(crate) fn all_of(index: Index<'_>) -> impl Iterator<Item = (Self, u64)> {
        Self::some_of(index, 0..index.len())
    }

    fn some_of(index: Index<'_>, documents: Range<usize>) -> impl Iterator<Item = (Self, u64)> {
        documents.map(move |number| {
            let (entry, span) = (index.entry(number), index.span(number));
            let document = Self {
                start: span.start as u32,
                labels: span.len() as u32,
                text_bytes: entry.text_bytes,
            };
            (document, entry.hash)
        })
    }
}

/// The training documents of some blocks in rows.
pub(crate) struct Group {
    documents: Vec<Member>,
    /// In the order of packing.
    packed: Vec<Vec<Piece>>,
    /// The order of the stream, by number in `packed`.
    shuffled: Vec<u32>,
    /// Of each block. Empty in a plan.
    windows: Vec<BlockTokens>,
}

/// The tokens of a block's training documents.
struct BlockTokens {
    shard: usize,
    /// Where they begin in the shard.
    start: u32,
    /// None, if it has no such documents.
    ids: Option<MappedIds>,
}

/// Where a part of a row comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    /// The shard's name.
    pub shard: String,
    /// Where the document begins in the shard.
    pub first_token: u64,
    /// Labels of the whole document.
    pub document_labels: usize,
    /// Which of them is the part's first.
    pub first_label: usize,
}

#[derive(Clone, Copy)]
struct Member {
    block: u32,
    document: Document,
}

impl Group {
    /// Shuffles and packs the documents, by the shards' indices alone.
    pub(crate) fn plan(
        inner: &Inner,
        blocks: &[Block],
        epoch: u64,
        number: u64,
    ) -> Result<Self, CacheError> {
        let mut documents = Vec::new();
        for (place, block) in blocks.iter().enumerate() {
            let index = inner.cache.index(block.shard)?;
            let index = index.get();
            let all = Document::some_of(index, index.starting_in(block.starts.clone()));
            let training = all.filter(|(_, hash)| !inner.split.holds_out(*hash));
            documents.extend(training.map(|(document, _)| Member {
                block: place as u32,
                document,
            }));
        }
        let mut rng = shuffle::rng(inner.options.seed, epoch, number);
        documents.shuffle(&mut rng);
        let lengths = documents.iter().map(|member| member.document.labels);
        let options = &inner.options;
        let packer = Packer::new(lengths.enumerate(), options.packing, options.row_tokens);
        let packed: Vec<_> = packer.collect();
        let mut shuffled: Vec<u32> = (0..packed.len() as u32).collect();
        shuffled.shuffle(&mut rng);
        Ok(Self {
            documents,
            packed,
            shuffled,
            windows: Vec::new(),
        })
    }

    /// A plan with the tokens at hand.
    pub(crate) fn load(
        inner: &Inner,
        blocks: &[Block],
        epoch: u64,
        number: u64,
    ) -> Result<Self, CacheError> {
        let mut group = Self::plan(inner, blocks, epoch, number)?;
        let mut spans: Vec<Option<Range<u64>>> = vec![None; blocks.len()];
        for Member { block, document } in &group.documents {
            let start = u64::from(document.start);
            let end = start + u64::from(document.labels);
            let span = spans[*block as usize].get_or_insert(start..end);
            *span = span.start.min(start)..span.end.max(end);
        }
        for (block, span) in blocks.iter().zip(spans) {
            let start = span.as_ref().map_or(0, |span| span.start as u32);
            let read = |span| inner.cache.tokens(block.shard, span);
            group.windows.push(BlockTokens {
                shard: block.shard,
                start,
                ids: span.map(read).transpose()?,
            });
        }
        Ok(group)
    }

    /// Rows.
    pub(crate) fn len(&self) -> usize {
        self.packed.len()
    }

    /// All rows' pieces in the order of packing.
    pub(crate) fn packed(&self) -> &[Vec<Piece>] {
        &self.packed
    }

    /// Row `number` of the stream. The group must be loaded.
    pub(crate) fn shuffled_row(&self, inner: &Inner, number: usize) -> Result<Row, DatasetError> {
        self.row(inner, &self.packed[self.shuffled[number] as usize])
    }

    /// The row of these pieces. The group must be loaded.
    pub(crate) fn row(&self, inner: &Inner, pieces: &[Piece]) -> Result<Row, DatasetError> {
        let part = |&piece: &Piece| {
            let Member { block, document } = self.documents[piece.document];
            let window = &self.windows[block as usize];
            let start = (document.start - window.start) as usize;
            let ids = window.ids.as_ref()?;
            Some(Part {
                piece,
                ids: ids.get().slice(start..start + document.labels as usize),
                text_bytes: document.text_bytes,
            })
        };
        let parts: Vec<Part<'_>> = pieces.iter().filter_map(part).collect();
        inner.assemble(parts.into_iter())
    }

    /// Where the parts of row `number` of the stream come from. The group must be loaded.
    pub(crate) fn parts(&self, inner: &Inner, number: usize) -> Vec<RowPart> {
        let pieces = &self.packed[self.shuffled[number] as usize];
        let part = |piece: &Piece| {
            let Member { block, document } = self.documents[piece.document];
            let shard = self.windows[block as usize].shard;
            RowPart {
                shard: inner.cache.manifest().shards[shard].name.clone(),
                first_token: document.start.into(),
                document_labels: document.labels as usize,
                first_label: piece.start,
            }
        };
        pieces.iter().map(part).collect()
    }

    pub(crate) fn report(&self, row_tokens: usize) -> PackReport {
        let mut report = PackReport::default();
        for pieces in &self.packed {
            report.add(pieces, row_tokens, |document| {
                let document = self.documents[document].document;
                (u64::from(document.labels) - 1, document.text_bytes.into())
            });
        }
        report
    }
}
