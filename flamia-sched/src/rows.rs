//! What a kernel has to know of each row, and of each tile of rows, of a packed row.

use crate::{Documents, TILE};

/// Where a row lies. The layout is that of the table a GPU builds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cuda", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct RowPlace {
    /// Index of the row's document, empty ones counted.
    pub document: i32,
    /// The row, counted from its document's start.
    pub position: i32,
    /// First row of the document.
    pub start: i32,
    /// One past the last row of the document.
    pub end: i32,
}

/// What a tile of [`TILE`] rows, counted from the start of the packed row, reaches into.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cuda", derive(bytemuck::Pod, bytemuck::Zeroable))]
pub struct TileBounds {
    /// Document of the tile's first row.
    pub first_document: i32,
    /// Document of the tile's last row.
    pub last_document: i32,
    /// First row of the first document: no row of the tile sees an earlier one.
    pub start: i32,
    /// One past the last row of the last document: no row of the tile sees a later one.
    pub end: i32,
}

/// The place of every row, in order.
pub fn row_places(documents: &Documents) -> Vec<RowPlace> {
    (0..)
        .zip(documents.iter())
        .flat_map(|(document, rows)| {
            let (start, end) = (rows.start as i32, rows.end as i32);
            (start..end).map(move |row| RowPlace {
                document,
                position: row - start,
                start,
                end,
            })
        })
        .collect()
}

/// The bounds of every tile of the packed row, in order; the last tile may be short.
pub fn tile_bounds(places: &[RowPlace]) -> Vec<TileBounds> {
    places
        .chunks(TILE)
        .map(|tile| {
            let (first, last) = (tile[0], tile[tile.len() - 1]);
            TileBounds {
                first_document: first.document,
                last_document: last.document,
                start: first.start,
                end: last.end,
            }
        })
        .collect()
}
