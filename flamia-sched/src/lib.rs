//! Packed documents and the tiles both attention passes visit.
//!
//! A *packed row* is a run of tokens that holds several documents one after another; `cu_seqlens`
//! (cumulative sequence lengths) gives their boundaries. Attention never crosses a boundary, and
//! every tile and block is counted from its document's first row, never from the packed row's, so
//! that a document is computed the same way wherever it lies.
//!
//! This crate is integers in, integers out: it knows no number format and no tensor. With the feature
//! `cuda` a GPU makes the same lists from boundaries that lie there.

#[cfg(feature = "cuda")]
pub mod cuda;
mod documents;
mod mask;
pub mod ranks;
mod rows;
pub mod simulate;
mod tiles;
pub mod work;
pub mod workloads;

pub use documents::{Documents, DocumentsError};
pub use mask::{Mask, UnknownMask};
pub use rows::{RowPlace, TileBounds, row_places, tile_bounds};
pub use tiles::{
    BLOCK, KeyTile, QueryTile, TILE, key_tiles, query_tile_cost, query_tiles, query_tiles_for_keys,
    visible_keys,
};
