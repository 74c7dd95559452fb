//! How a pass cuts documents into work items, and what an item costs.

use std::cmp::Reverse;
use std::ops::Range;

use crate::tiles::{keys_seen_by, queries_that_see};
use crate::{Documents, Mask, TILE};

/// Which pass the work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// An item is a run of queries and walks the keys it sees.
    Forward,
    /// An item is a run of keys and walks the queries that see it.
    Backward,
}

/// A run of rows of one document: what one CTA computes for one head at a time.
///
/// The layout is that of the lists a GPU builds, 16 bytes that a kernel reads with one load.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "cuda", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct WorkItem {
    /// Index of the document, empty ones counted.
    pub document: i32,
    /// First row of the run, counted from the document's start.
    pub first: i32,
    /// First row of the document in the packed row.
    pub start: i32,
    /// Rows of the document.
    pub len: i32,
}

/// How one pass cuts documents into items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Queries or keys.
    pub pass: Pass,
    /// Decides what an item attends to, and so what it costs.
    pub mask: Mask,
    /// Rows of an item; the last one of a document may be shorter.
    pub item_rows: usize,
    /// Documents that start within so many rows of the packed row go out together, before those that start
    /// behind them: what they share is then still in the L2 cache, which the longest items of all documents
    /// together do not fit. The rows behind [`Tiling::MAX_SECTIONS`] times as many are one more section.
    pub section_rows: usize,
}

impl Tiling {
    /// Sections of documents that a list has at most.
    pub const MAX_SECTIONS: usize = 256;

    /// Two tiles of queries a CTA, as the paper's forward kernel takes them (section 3.6.2).
    pub const fn forward(mask: Mask) -> Self {
        Self {
            pass: Pass::Forward,
            mask,
            item_rows: 2 * TILE,
            section_rows: usize::MAX,
        }
    }

    /// One tile of keys a CTA.
    pub const fn backward(mask: Mask) -> Self {
        Self {
            pass: Pass::Backward,
            mask,
            item_rows: TILE,
            section_rows: usize::MAX,
        }
    }

    /// The same with items of so many rows.
    ///
    /// # Panics
    /// If `item_rows` is zero, which would cut a document into nothing.
    pub const fn with_item_rows(self, item_rows: usize) -> Self {
        assert!(item_rows > 0, "an item has at least one row");
        Self { item_rows, ..self }
    }

    /// The same with documents in sections of so many rows.
    ///
    /// # Panics
    /// If `section_rows` is zero.
    pub const fn with_section_rows(self, section_rows: usize) -> Self {
        assert!(section_rows > 0, "a section has at least one row");
        Self {
            section_rows,
            ..self
        }
    }

    /// The items of all documents in document order, first rows first.
    pub fn items(&self, documents: &Documents) -> impl Iterator<Item = WorkItem> {
        let item_rows = self.item_rows;
        (0..)
            .zip(documents.iter())
            .flat_map(move |(document, rows)| {
                (0..rows.len())
                    .step_by(item_rows)
                    .map(move |first| WorkItem {
                        document,
                        first: first as i32,
                        start: rows.start as i32,
                        len: rows.len() as i32,
                    })
            })
    }

    /// The rows of an item, counted from its document's start.
    pub fn rows(&self, item: &WorkItem) -> Range<usize> {
        let first = item.first as usize;
        first..(item.len as usize).min(first.saturating_add(self.item_rows))
    }

    /// The work of an item: blocks of [`TILE`] keys that its queries attend to, or of queries that
    /// attend to its keys. Blocks count from the document's start and are visited whole.
    pub fn cost(&self, item: &WorkItem) -> usize {
        let (len, rows) = (item.len as usize, self.rows(item));
        let met = match self.pass {
            Pass::Forward => keys_seen_by(len, &rows, self.mask),
            Pass::Backward => queries_that_see(len, &rows, self.mask),
        };
        met.end.div_ceil(TILE) - met.start / TILE
    }

    /// The section of an item's document.
    pub fn section(&self, item: &WorkItem) -> usize {
        (item.start as usize / self.section_rows).min(Self::MAX_SECTIONS - 1)
    }

    /// The items in the order they go out: section after section, in each most work first, so that what is
    /// left at the end is short; equal work in order of the packed row, so that the order is the same
    /// everywhere.
    pub fn longest_first(&self, documents: &Documents) -> Vec<WorkItem> {
        let mut items: Vec<_> = self.items(documents).collect();
        // Stable, and the items come in order of the packed row.
        items.sort_by_key(|item| (self.section(item), Reverse(self.cost(item))));
        items
    }
}
