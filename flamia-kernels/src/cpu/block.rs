//! Which keys of a tile a block of queries sees.

use std::ops::Range;

use flamia_sched::{Mask, visible_keys};

use super::gemm::PAD;

/// [`PAD`] query rows against the keys of one tile, in rows of the document.
///
/// Whole token blocks of keys that no row sees are left out, so that nothing is read from them:
/// a NaN there stays there.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// First query row.
    pub row: usize,
    /// First key.
    pub key: usize,
    /// Keys computed, in whole token blocks.
    pub width: usize,
    len: usize,
    mask: Mask,
}

impl Block {
    /// `None` if no row of the block sees a key of the tile.
    #[inline(always)]
    pub fn new(row: usize, keys: &Range<usize>, len: usize, mask: Mask) -> Option<Self> {
        let last = (row + PAD).min(len) - 1;
        // A later row sees neither an earlier first key nor an earlier last one.
        let start = visible_keys(row, len, mask).start.max(keys.start);
        let end = visible_keys(last, len, mask).end.min(keys.end);
        if start >= end {
            return None;
        }
        let key = start / PAD * PAD;
        Some(Self {
            row,
            key,
            width: (end - key).next_multiple_of(PAD),
            len,
            mask,
        })
    }

    /// Which of the keys row `row + i` sees, counted from `key`; none for a row past the document's
    /// end.
    #[inline(always)]
    pub fn visible(&self, i: usize) -> Range<usize> {
        let row = self.row + i;
        if row >= self.len {
            return 0..0;
        }
        let seen = visible_keys(row, self.len, self.mask);
        let end = seen.end.saturating_sub(self.key).min(self.width);
        seen.start.saturating_sub(self.key).min(end)..end
    }
}
