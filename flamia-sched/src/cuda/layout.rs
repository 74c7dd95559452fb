//! Where everything lies in a schedule's buffer, from the row length alone.

use crate::cuda::header::ScheduleHeader;
use crate::work::WorkItem;
use crate::{DocumentsError, RowPlace, TILE, TileBounds};

/// Keys that one CTA sorts, one a thread.
pub(super) const RUN: usize = 256;

/// Sorted runs that one launch merges.
pub(super) const FAN_IN: usize = 32;

/// Bytes of alignment that every part starts at, and that the buffer must have.
pub const ALIGN: usize = 256;

/// The parts of a schedule's buffer, as byte offsets.
///
/// A row of `total` tokens has at most `total` documents that are not empty and at most as many
/// items in each pass, so its documents never change the layout: a buffer and a captured graph
/// serve every row of the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleLayout {
    /// Rows of the packed row.
    pub total: usize,
    /// The header, first.
    pub header: usize,
    /// A [`RowPlace`] per row.
    pub rows: usize,
    /// [`TileBounds`] per tile of the packed row.
    pub tiles: usize,
    /// [`WorkItem`]s of the forward pass, longest first; the header has their number.
    pub forward: usize,
    /// [`WorkItem`]s of the backward pass.
    pub backward: usize,
    /// Keys to sort: two lists of 8-byte keys, then as much again to merge into. Free once the
    /// schedule is built.
    pub keys: usize,
    /// Size of the buffer.
    pub bytes: usize,
}

impl ScheduleLayout {
    /// The layout for a packed row of `total` rows.
    ///
    /// # Errors
    /// When `total` is above `i32::MAX`.
    pub fn new(total: usize) -> Result<Self, DocumentsError> {
        if i32::try_from(total).is_err() {
            return Err(DocumentsError::TooManyRows { total });
        }
        let mut end = 0usize;
        let mut part = |bytes: usize| {
            let start = end;
            end = (end + bytes).next_multiple_of(ALIGN);
            start
        };
        let header = part(size_of::<ScheduleHeader>());
        let rows = part(total * size_of::<RowPlace>());
        let tiles = part(total.div_ceil(TILE) * size_of::<TileBounds>());
        let forward = part(total * size_of::<WorkItem>());
        let backward = part(total * size_of::<WorkItem>());
        let keys = part(4 * Self::key_list(total));
        Ok(Self {
            total,
            header,
            rows,
            tiles,
            forward,
            backward,
            keys,
            bytes: end,
        })
    }

    /// Bytes of one list of keys.
    pub(super) fn key_list(total: usize) -> usize {
        (total * size_of::<u64>()).next_multiple_of(ALIGN)
    }

    /// Kernel launches of a construction: clearing, expanding, sorting runs, and the merges.
    pub fn launches(&self) -> usize {
        3 + self.merges().count()
    }

    /// The run length that each merge starts from, and whether it is the last.
    pub(super) fn merges(&self) -> impl Iterator<Item = (usize, bool)> {
        let total = self.total;
        let lengths = std::iter::successors(Some(RUN), move |&run| {
            (run * FAN_IN < total).then_some(run * FAN_IN)
        });
        lengths.map(move |run| (run, run * FAN_IN >= total))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_one_another_aligned() {
        for total in [0, 1, 127, 128, 4096, 131_072, 131_073] {
            let layout = ScheduleLayout::new(total).unwrap();
            let parts = [
                (layout.header, 64),
                (layout.rows, 16 * total),
                (layout.tiles, 16 * total.div_ceil(128)),
                (layout.forward, 16 * total),
                (layout.backward, 16 * total),
                (layout.keys, 32 * total),
            ];
            let ends = parts[1..].iter().map(|part| part.0).chain([layout.bytes]);
            for (part, end) in parts.iter().zip(ends) {
                assert!(part.0 % ALIGN == 0 && part.0 + part.1 <= end, "{layout:?}");
            }
        }
        assert!(ScheduleLayout::new(i32::MAX as usize).is_ok());
        assert!(ScheduleLayout::new(i32::MAX as usize + 1).is_err());
    }

    #[test]
    fn the_row_length_alone_decides_the_launches() {
        let merges = |total| -> Vec<_> { ScheduleLayout::new(total).unwrap().merges().collect() };
        assert_eq!(merges(0), [(RUN, true)]);
        assert_eq!(merges(RUN * FAN_IN), [(RUN, true)]);
        assert_eq!(
            merges(RUN * FAN_IN + 1),
            [(RUN, false), (RUN * FAN_IN, true)]
        );
        assert_eq!(merges(i32::MAX as usize).len(), 5);
        assert_eq!(ScheduleLayout::new(131_072).unwrap().launches(), 5);
    }
}
