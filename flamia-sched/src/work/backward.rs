//! The launches of the backward pass.

use crate::TILE;

/// One CTA per position on a grid that the row length alone decides, and a persistent launch for
/// the positions past it.
///
/// A persistent kernel for all would keep every descriptor alive across its loop and spill (the
/// paper's appendix B.6), and the number of positions is known to the GPU alone. Positions are
/// sorted, so what the second launch gets is the shortest work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardLaunch {
    /// CTAs of the first launch; CTA `i` does position `i` if there is one.
    pub grid: usize,
    /// CTAs of the second launch; CTA `i` does positions `grid + i`, `grid + i + overflow`, ….
    pub overflow: usize,
}

impl BackwardLaunch {
    /// Rows per document, on average, down to which nothing overflows.
    pub const MEAN_ROWS: usize = 4 * TILE;

    /// The launches for a packed row of `total` rows: every key tile of the row fits the first one,
    /// and the short last tiles of as many documents as [`MEAN_ROWS`](Self::MEAN_ROWS) allows.
    pub fn for_row(total: usize, heads: usize, multiprocessors: usize) -> Self {
        Self {
            grid: heads * (total.div_ceil(TILE) + total.div_ceil(Self::MEAN_ROWS)),
            overflow: multiprocessors,
        }
    }

    /// The positions of CTA `cta` of the second launch, out of `positions`.
    pub fn overflow_positions(&self, cta: usize, positions: usize) -> impl Iterator<Item = usize> {
        (self.grid + cta..positions).step_by(self.overflow)
    }
}

/// CTAs that share one key tile of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileCtas {
    /// One CTA per key tile.
    One,
    /// A pair of CTAs with a shared tensor memory operand; Blackwell only.
    Two,
}

/// What the rule asks of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardCall {
    /// Keys of the packed row.
    pub keys: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Whether each document has as many queries as keys, as in self-attention.
    pub equal_lengths: bool,
    /// Whether results must be the same bits on every run.
    pub deterministic: bool,
    /// Whether the two-CTA kernel exists for this head dimension and format.
    pub supported: bool,
}

/// When two CTAs share a key tile (the paper's appendix B.3).
///
/// Fitted to measurements, and to be fitted again for every operand format: a rule tuned for one
/// did not fit the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileCtasRule {
    /// From so many keys on, every supported call.
    pub every_call_from: usize,
    /// Below that, multi-head calls with equal query and key lengths.
    pub multi_head_below: bool,
}

impl TileCtasRule {
    /// The paper's, on B200.
    pub const PAPER: Self = Self {
        every_call_from: 32 * 1024,
        multi_head_below: true,
    };

    /// The kernel for a call.
    pub fn choose(&self, call: &BackwardCall) -> TileCtas {
        let multi_head = call.heads == call.kv_heads;
        let wanted = call.keys >= self.every_call_from
            || (self.multi_head_below && multi_head && call.equal_lengths);
        if wanted && call.supported && !call.deterministic {
            TileCtas::Two
        } else {
            TileCtas::One
        }
    }
}
