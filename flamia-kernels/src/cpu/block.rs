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
        let end = visible_keys(last, len, mask).end.min(keys.end);
        let width = end
            .checked_sub(keys.start)
            .filter(|width| *width > 0)?
            .next_multiple_of(PAD);
        Some(Self {
            row,
            key: keys.start,
            width,
            len,
            mask,
        })
    }

    /// How many of the keys row `row + i` sees; none for a row past the document's end.
    #[inline(always)]
    pub fn visible(&self, i: usize) -> usize {
        let row = self.row + i;
        if row >= self.len {
            return 0;
        }
        visible_keys(row, self.len, self.mask)
            .end
            .saturating_sub(self.key)
            .min(self.width)
    }
}
