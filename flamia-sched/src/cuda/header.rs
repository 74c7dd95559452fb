//! What the host can read of a schedule that a GPU built.

use crate::work::{Acquisition, Pass, WorkItem};
use crate::{Documents, DocumentsError, Mask};

flamia_cuda::parameters! {
    /// The first bytes of a schedule: kernels write it, and the host reads it.
    #[derive(PartialEq, Eq, bytemuck::AnyBitPattern)]
    pub struct ScheduleHeader {
        fault: u64,
        fault_value: i64,
        fault_previous: i64,
        documents: u32,
        longest: u32,
        items: [u32; 2],
        dynamic: u32,
        counters: [u32; 2],
        reserved: [u32; 3],
    }
}

/// What there is to do in a packed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleSummary {
    /// Documents that are not empty.
    pub documents: usize,
    /// Rows of the longest document.
    pub longest: usize,
    /// Items of the forward pass.
    pub forward_items: usize,
    /// Items of the backward pass.
    pub backward_items: usize,
    /// How the forward pass gets at its positions if all heads are in one section; see
    /// [`HeadSections::acquisition`](crate::work::HeadSections::acquisition).
    pub acquisition: Acquisition,
}

impl ScheduleSummary {
    /// The summary of these documents' items, forward and backward.
    pub(super) fn new(documents: &Documents, mask: Mask, items: [&[WorkItem]; 2]) -> Self {
        Self {
            documents: documents.iter().filter(|rows| !rows.is_empty()).count(),
            longest: documents.longest(),
            forward_items: items[0].len(),
            backward_items: items[1].len(),
            acquisition: Acquisition::choose(mask, documents),
        }
    }
}

impl ScheduleHeader {
    /// Byte offset of the counter that a pass's kernels acquire positions from. Zero after the
    /// construction, and again after every launch: launches of one pass that share a schedule run
    /// one after another.
    pub const fn counter_offset(pass: Pass) -> usize {
        let index = match pass {
            Pass::Forward => 0,
            Pass::Backward => 1,
        };
        std::mem::offset_of!(ScheduleHeader, counters) + index * size_of::<u32>()
    }

    /// Byte offset of the `u32` that says whether the forward pass acquires positions dynamically even if
    /// all heads are in one section. Zero has it static.
    pub const fn acquisition_offset() -> usize {
        std::mem::offset_of!(ScheduleHeader, dynamic)
    }

    /// What there is to do in a packed row of `total` rows.
    ///
    /// # Errors
    /// The boundaries were refused, with the reason that the host would have found. The schedule
    /// is empty then.
    pub fn summary(&self, total: usize) -> Result<ScheduleSummary, DocumentsError> {
        if let Some(error) = self.refused(total) {
            return Err(error);
        }
        Ok(ScheduleSummary {
            documents: self.documents as usize,
            longest: self.longest as usize,
            forward_items: self.items[0] as usize,
            backward_items: self.items[1] as usize,
            acquisition: if self.dynamic == 0 {
                Acquisition::Static
            } else {
                Acquisition::Dynamic
            },
        })
    }

    /// Why the boundaries were refused: kept inverted, the entry's index above three bits of kind.
    fn refused(&self, total: usize) -> Option<DocumentsError> {
        if self.fault == 0 {
            return None;
        }
        let (index, kind) = ((!self.fault >> 3) as usize, !self.fault & 7);
        let (value, previous) = (self.fault_value, self.fault_previous);
        Some(match kind {
            0 => DocumentsError::Start { value },
            1 => DocumentsError::Negative { index, value },
            2 => DocumentsError::Decreasing {
                index,
                value,
                previous,
            },
            3 => DocumentsError::PastEnd {
                index,
                value,
                total,
            },
            _ => DocumentsError::End {
                index,
                value,
                total,
            },
        })
    }
}
