//! A schedule in device memory of its own.

use flamia_cuda::{Buffer, Gpu, GpuError, Stream};

use super::build::{BuildCall, ScheduleError, ScheduleKernels};
use super::header::{ScheduleHeader, ScheduleSummary};
use super::layout::ScheduleLayout;
use crate::work::WorkItem;
use crate::{Documents, RowPlace, TILE, TileBounds, row_places, tile_bounds};

/// A schedule's buffer, for those who have no allocator to take one from.
///
/// Every row of the same length may be scheduled into it, one after another.
pub struct DeviceSchedule {
    buffer: Buffer<u8>,
    layout: ScheduleLayout,
}

/// All of a schedule, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSchedule {
    /// What there is to do.
    pub summary: ScheduleSummary,
    /// The place of every row.
    pub rows: Vec<RowPlace>,
    /// The bounds of every tile of the packed row.
    pub tiles: Vec<TileBounds>,
    /// Items of the forward pass, longest first.
    pub forward: Vec<WorkItem>,
    /// Items of the backward pass, longest first.
    pub backward: Vec<WorkItem>,
}

impl HostSchedule {
    /// What the GPU is to build for these documents, built here.
    pub fn new(documents: &Documents, call: &BuildCall) -> Self {
        let rows = row_places(documents);
        let [forward, backward] = call.tilings().map(|tiling| tiling.longest_first(documents));
        Self {
            summary: ScheduleSummary::new(documents, call.mask, [&forward, &backward]),
            tiles: tile_bounds(&rows),
            rows,
            forward,
            backward,
        }
    }

    /// The parts where a schedule's buffer has them, for a copy to the GPU; the header is left
    /// zero, since a copy comes from one who knows its contents.
    pub fn to_bytes(&self, layout: &ScheduleLayout) -> Vec<u8> {
        let mut bytes = vec![0; layout.keys];
        let mut put =
            |offset: usize, part: &[u8]| bytes[offset..][..part.len()].copy_from_slice(part);
        put(layout.rows, bytemuck::cast_slice(&self.rows));
        put(layout.tiles, bytemuck::cast_slice(&self.tiles));
        put(layout.forward, bytemuck::cast_slice(&self.forward));
        put(layout.backward, bytemuck::cast_slice(&self.backward));
        bytes
    }
}

impl DeviceSchedule {
    /// A buffer for packed rows of `total` rows.
    ///
    /// # Errors
    /// Too long a row, or no memory.
    pub fn new(gpu: &Gpu, total: usize) -> Result<Self, ScheduleError> {
        let layout = ScheduleLayout::new(total)?;
        // A schedule that is read before it is built is one without work.
        let buffer = Buffer::filled(gpu, layout.bytes, 0)?;
        Ok(Self { buffer, layout })
    }

    /// Where the parts lie.
    pub fn layout(&self) -> &ScheduleLayout {
        &self.layout
    }

    /// Device address of the buffer.
    pub fn pointer(&self) -> u64 {
        self.buffer.pointer()
    }

    /// Gives the construction to the stream; see [`ScheduleKernels::build`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, for the boundaries; and the stream's work is over before the buffer is dropped.
    pub unsafe fn build(
        &mut self,
        kernels: &ScheduleKernels,
        stream: Stream<'_>,
        call: &BuildCall,
    ) -> Result<(), ScheduleError> {
        // SAFETY: the buffer is of this layout and borrowed; the caller vouches for the rest.
        unsafe { kernels.build(stream, &self.layout, self.pointer(), call) }
    }

    /// Waits for the GPU and reads what there is to do.
    ///
    /// # Errors
    /// The boundaries were refused, or the GPU failed.
    pub fn summary(&self) -> Result<ScheduleSummary, ScheduleError> {
        Ok(self.header()?.summary(self.layout.total)?)
    }

    /// Waits for the GPU and copies all of the schedule.
    ///
    /// # Errors
    /// The boundaries were refused, or the GPU failed.
    pub fn download(&self) -> Result<HostSchedule, ScheduleError> {
        let summary = self.summary()?;
        let bytes = self.buffer.download()?;
        let layout = &self.layout;
        Ok(HostSchedule {
            summary,
            rows: part(&bytes, layout.rows, layout.total),
            tiles: part(&bytes, layout.tiles, layout.total.div_ceil(TILE)),
            forward: part(&bytes, layout.forward, summary.forward_items),
            backward: part(&bytes, layout.backward, summary.backward_items),
        })
    }

    fn header(&self) -> Result<ScheduleHeader, GpuError> {
        let bytes = self.buffer.first(size_of::<ScheduleHeader>())?;
        Ok(bytemuck::pod_read_unaligned(&bytes))
    }
}

fn part<T: bytemuck::Pod>(bytes: &[u8], offset: usize, count: usize) -> Vec<T> {
    bytes[offset..offset + count * size_of::<T>()]
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}
