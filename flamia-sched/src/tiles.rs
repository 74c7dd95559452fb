//! The tiles of one document, as the forward and the backward pass visit them.
//!
//! All rows here are counted from the document's first row. The forward pass takes a tile of
//! queries and walks the key tiles it sees; the backward pass takes a tile of keys and walks the
//! query tiles that see it. Both walk the same set of (query tile, key tile) pairs.

use std::ops::Range;

use crate::Mask;

/// Rows of a query or key tile.
pub const TILE: usize = 128;

/// Rows of a quantisation block. A tile holds a whole number of them, so no block is ever split.
pub const BLOCK: usize = 32;

/// A tile of keys that at least one row of a query tile sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyTile {
    /// The keys, counted from the document's start; at most [`TILE`], from the tile's first one on,
    /// none past the last one that the query tile sees.
    pub range: Range<usize>,
    /// Whether some row of the query tile must not see some of these keys, so that the scores need
    /// masking.
    pub masked: bool,
}

/// A tile of queries of which at least one row sees a key tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryTile {
    /// The query rows, counted from the document's start; at most [`TILE`].
    pub range: Range<usize>,
    /// Whether some of these rows must not see some of the keys, so that the scores need masking.
    pub masked: bool,
}

/// The keys that query `row` of a document of `len` rows sees.
pub fn visible_keys(row: usize, len: usize, mask: Mask) -> Range<usize> {
    match mask {
        Mask::Causal => 0..row + 1,
        Mask::Full => 0..len,
        Mask::Window(keys) => (row + 1).saturating_sub(keys.get())..row + 1,
    }
}

/// The tiles of a document of `len` rows, first to last; the last may be short. Keys are tiled the
/// same way.
pub fn query_tiles(len: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    (0..len.div_ceil(TILE)).map(move |tile| tile_range(tile, len))
}

/// The key tiles that `query_tile` of a document of `len` rows sees, from the last down to the
/// first: the order in which the forward pass meets them, so that the diagonal sets the running
/// maximum.
pub fn key_tiles(
    len: usize,
    query_tile: Range<usize>,
    mask: Mask,
) -> impl ExactSizeIterator<Item = KeyTile> {
    let seen = keys_seen_by(len, &query_tile, mask);
    (seen.start / TILE..seen.end.div_ceil(TILE))
        .rev()
        .map(move |tile| {
            let range = tile_range(tile, seen.end);
            let masked = needs_mask(&query_tile, &range, mask);
            KeyTile { range, masked }
        })
}

/// The query tiles of a document of `len` rows that see `key_tile`, first to last: the same pairs
/// as [`key_tiles`], seen from the keys, as the backward pass meets them.
pub fn query_tiles_for_keys(
    len: usize,
    key_tile: Range<usize>,
    mask: Mask,
) -> impl ExactSizeIterator<Item = QueryTile> {
    let seen_by = queries_that_see(len, &key_tile, mask);
    (seen_by.start / TILE..seen_by.end.div_ceil(TILE)).map(move |tile| {
        let range = tile_range(tile, len);
        let masked = needs_mask(&range, &key_tile, mask);
        QueryTile { range, masked }
    })
}

/// The work of `query_tile` in blocks of [`BLOCK`] keys visited, for balancing threads.
pub fn query_tile_cost(len: usize, query_tile: Range<usize>, mask: Mask) -> usize {
    let seen = keys_seen_by(len, &query_tile, mask);
    seen.end.div_ceil(BLOCK) - seen.start / BLOCK
}

fn tile_range(tile: usize, len: usize) -> Range<usize> {
    tile * TILE..len.min((tile + 1) * TILE)
}

/// What any row of a run of queries sees: from what the first one sees to what the last one does.
pub(crate) fn keys_seen_by(len: usize, queries: &Range<usize>, mask: Mask) -> Range<usize> {
    if queries.is_empty() {
        return 0..0;
    }
    let (first, last) = (queries.start, queries.end - 1);
    visible_keys(first, len, mask).start..visible_keys(last, len, mask).end
}

/// The queries that see any of a run of keys: from the first one that sees the first key to the last
/// one that sees the last.
pub(crate) fn queries_that_see(len: usize, keys: &Range<usize>, mask: Mask) -> Range<usize> {
    if keys.is_empty() {
        return 0..0;
    }
    match mask {
        Mask::Causal => keys.start..len,
        Mask::Full => 0..len,
        Mask::Window(window) => keys.start..len.min((keys.end - 1).saturating_add(window.get())),
    }
}

/// Whether some query does not see some key: a row sees the fewest later keys at the start of the
/// run, and the fewest earlier ones at its end.
fn needs_mask(queries: &Range<usize>, keys: &Range<usize>, mask: Mask) -> bool {
    let (first, last) = (queries.start, queries.end - 1);
    match mask {
        Mask::Full => false,
        Mask::Causal => keys.end > first + 1,
        Mask::Window(window) => {
            keys.end > first + 1 || keys.start < (last + 1).saturating_sub(window.get())
        }
    }
}
