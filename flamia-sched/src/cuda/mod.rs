//! Schedules built on a GPU from `cu_seqlens` that lie there (the paper's section 3.6.2 and
//! appendix B.6).
//!
//! A fixed number of ordinary launches, decided by the row length: no synchronisation with the
//! host, no cooperative launch, nothing that a CUDA graph cannot capture. The host never learns the
//! number of documents; a tensor of `cu_seqlens` longer than its documents need ends in empty ones,
//! that is in repetitions of the row length. What comes out is bit for bit what this crate builds on
//! the CPU.
//!
//! Boundaries that no packed row could have are found on the GPU too: the schedule is empty then,
//! and its header says why, for the host to read when it next looks.

mod build;
mod header;
mod layout;
mod schedule;

pub use build::{Boundary, BuildCall, SOURCE, ScheduleError, ScheduleKernels};
pub use header::{ScheduleHeader, ScheduleSummary};
pub use layout::{ALIGN, ScheduleLayout};
pub use schedule::{DeviceSchedule, HostSchedule};

/// What a schedule is on the device, and how an attention kernel's CTAs walk it: the header for
/// kernels that use one. Includes [`flamia_cuda::PARAMETERS_HEADER`].
pub const SCHEDULE_HEADER: flamia_cuda::Header = flamia_cuda::header!("schedule.cuh");

/// Dynamic acquisition by Cluster Launch Control, for kernels of sm_100 and later. Compiled, and never
/// yet run: includes [`SCHEDULE_HEADER`].
pub const CLAIM_HEADER: flamia_cuda::Header = flamia_cuda::header!("claim.cuh");

/// The macros that [`SCHEDULE_HEADER`] checks its structures with.
pub fn schedule_defines() -> Vec<(&'static str, String)> {
    let mut defines = ScheduleHeader::defines();
    defines.extend([
        (
            "HOST_SIZEOF_WORK_ITEM",
            size_of::<crate::work::WorkItem>().to_string(),
        ),
        (
            "HOST_SIZEOF_ROW_PLACE",
            size_of::<crate::RowPlace>().to_string(),
        ),
        (
            "HOST_SIZEOF_TILE_BOUNDS",
            size_of::<crate::TileBounds>().to_string(),
        ),
    ]);
    defines
}
