//! The launches that build a schedule.

use flamia_cuda::{
    BuildError, Gpu, GpuError, Kernel, Launch, PARAMETERS_HEADER, Source, Stream, parameters,
};

use super::layout::{FAN_IN, RUN, ScheduleLayout};
use super::{SCHEDULE_HEADER, schedule_defines};
use crate::work::Tiling;
use crate::{DocumentsError, Mask};

/// The kernels' source.
pub const SOURCE: Source = Source {
    name: "flamia-sched/src/cuda/build.cu",
    text: include_str!("build.cu"),
    headers: &[PARAMETERS_HEADER, SCHEDULE_HEADER],
};

/// Threads of a CTA, as `build.cu` has them.
const CLEAR_THREADS: u32 = 32;
const EXPAND_THREADS: u32 = 1024;
const MERGE_THREADS: u32 = 256;

/// Passes that are scheduled: the second dimension of the sorting grids.
const PASSES: u32 = 2;

/// Integers that boundaries come as; torch has both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Boundary {
    /// 32 bits, signed.
    Int32,
    /// 64 bits, signed.
    Int64,
}

impl Boundary {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Int32, Self::Int64];

    fn device_type(self) -> &'static str {
        match self {
            Self::Int32 => "int",
            Self::Int64 => "long long",
        }
    }

    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(self) -> Vec<(&'static str, String)> {
        let mut defines = schedule_defines();
        defines.extend(BuildParams::defines());
        defines.extend([
            ("CU_SEQLEN", self.device_type().to_owned()),
            ("RUN", RUN.to_string()),
            ("FAN_IN", FAN_IN.to_string()),
            ("MAX_SECTIONS", format!("{}u", Tiling::MAX_SECTIONS)),
        ]);
        defines
    }
}

parameters! {
    /// What every kernel takes.
    struct BuildParams {
        cu_seqlens: u64,
        header: u64,
        rows: u64,
        tiles: u64,
        items: [u64; 2],
        keys: [u64; 2],
        spare: [u64; 2],
        entries: u32,
        total: u32,
        item_rows: [u32; 2],
        section_rows: [u32; 2],
        mask: u32,
        window: u32,
    }
}

/// What to build: boundaries on the device, and what the host knows.
#[derive(Clone, Copy, Debug)]
pub struct BuildCall {
    /// Device address of `cu_seqlens`: non-decreasing, from 0 to the row length.
    pub cu_seqlens: u64,
    /// Its entries: one more than documents, empty ones at the end included.
    pub entries: usize,
    /// Which keys a query sees: it decides what items cost.
    pub mask: Mask,
    /// Queries of a forward item and keys of a backward one.
    pub item_rows: [usize; 2],
    /// [`Tiling::section_rows`] of each pass.
    pub section_rows: [usize; 2],
}

impl BuildCall {
    /// With items of the paper's sizes: two tiles of queries, one of keys.
    pub const fn new(cu_seqlens: u64, entries: usize, mask: Mask) -> Self {
        Self {
            cu_seqlens,
            entries,
            mask,
            item_rows: [
                Tiling::forward(mask).item_rows,
                Tiling::backward(mask).item_rows,
            ],
            section_rows: [usize::MAX; 2],
        }
    }

    /// How each pass cuts documents.
    pub fn tilings(&self) -> [Tiling; 2] {
        let [forward, backward] = self.item_rows;
        let [forward_section, backward_section] = self.section_rows;
        [
            Tiling::forward(self.mask)
                .with_item_rows(forward)
                .with_section_rows(forward_section),
            Tiling::backward(self.mask)
                .with_item_rows(backward)
                .with_section_rows(backward_section),
        ]
    }
}

/// A schedule that was not built.
#[derive(Debug, thiserror::Error)]
pub enum ScheduleError {
    /// Shapes that no packed row has.
    #[error(transparent)]
    Documents(#[from] DocumentsError),
    /// An item without rows.
    #[error("a work item of {rows} rows cuts a document into nothing: give at least 1")]
    ItemRows {
        /// Rows that were asked for.
        rows: usize,
    },
    /// A section without rows.
    #[error("a section of {rows} rows holds no document: give at least 1")]
    SectionRows {
        /// Rows that were asked for.
        rows: usize,
    },
    /// The GPU refuses.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The compiled kernels, on one GPU.
pub struct ScheduleKernels {
    clear: Kernel,
    expand: Kernel,
    sort_runs: Kernel,
    merge: Kernel,
}

impl ScheduleKernels {
    /// Compiles the kernels for boundaries of this type, or finds them in the cache.
    ///
    /// # Errors
    /// There is no compiler, or the GPU does not take its code.
    pub fn new(gpu: &Gpu, boundary: Boundary) -> Result<Self, BuildError> {
        let module = gpu.compile(&SOURCE, &boundary.defines())?;
        let kernel = |name| module.kernel(name);
        Ok(Self {
            clear: kernel("schedule_clear")?,
            expand: kernel("schedule_expand")?,
            sort_runs: kernel("schedule_sort_runs")?,
            merge: kernel("schedule_merge")?,
        })
    }

    /// Gives the construction of a row's schedule, into the buffer at the device address `schedule`,
    /// to the stream.
    ///
    /// The launches depend on the layout and the number of entries alone: captured in a graph, they
    /// build the schedule of whatever boundaries lie at the address when the graph is replayed.
    ///
    /// # Errors
    /// Shapes that no packed row has, or a launch that the GPU refuses.
    ///
    /// # Safety
    /// - `cu_seqlens` are `entries` boundaries of this value's type, `schedule` is a buffer of this
    ///   layout, aligned to [`super::ALIGN`], both on the stream's GPU and valid until the work has
    ///   run.
    /// - No other work uses the buffer meanwhile.
    pub unsafe fn build(
        &self,
        stream: Stream<'_>,
        layout: &ScheduleLayout,
        schedule: u64,
        call: &BuildCall,
    ) -> Result<(), ScheduleError> {
        let total = layout.total;
        if call.entries < 2 {
            let entries = call.entries;
            return Err(DocumentsError::TooShort { entries, total }.into());
        }
        let Ok(entries) = i32::try_from(call.entries - 1).map(|count| count as u32 + 1) else {
            let count = call.entries - 1;
            return Err(DocumentsError::TooManyDocuments { count }.into());
        };
        if let Some(&rows) = call.item_rows.iter().find(|&&rows| rows == 0) {
            return Err(ScheduleError::ItemRows { rows });
        }
        if let Some(&rows) = call.section_rows.iter().find(|&&rows| rows == 0) {
            return Err(ScheduleError::SectionRows { rows });
        }
        let at = |offset: usize| schedule + offset as u64;
        let list = |index| at(layout.keys + index * ScheduleLayout::key_list(total));
        let (mask, window) = match call.mask {
            Mask::Causal => (0, 0),
            Mask::Full => (1, 0),
            Mask::Window(keys) => (2, saturated(keys.get())),
        };
        let params = BuildParams {
            cu_seqlens: call.cu_seqlens,
            header: at(layout.header),
            rows: at(layout.rows),
            tiles: at(layout.tiles),
            items: [at(layout.forward), at(layout.backward)],
            keys: [list(0), list(1)],
            spare: [list(2), list(3)],
            entries,
            total: total as u32,
            item_rows: call.item_rows.map(saturated),
            section_rows: call.section_rows.map(saturated),
            mask,
            window,
        };
        let Self {
            clear,
            expand,
            sort_runs,
            merge,
        } = self;
        let expanded = total.max(call.entries);
        let over_passes = |ctas, threads| Launch {
            grid: [ctas, PASSES, 1],
            ..Launch::linear(ctas, threads)
        };
        // SAFETY: the kernels are build.cu's, which takes these parameters; the caller vouches for
        // the memory.
        unsafe {
            clear.launch(stream, Launch::linear(1, CLEAR_THREADS), (params,))?;
            let expand_ctas = ctas(expanded, EXPAND_THREADS as usize);
            expand.launch(
                stream,
                Launch::linear(expand_ctas, EXPAND_THREADS),
                (params,),
            )?;
            sort_runs.launch(stream, over_passes(ctas(total, RUN), RUN as u32), (params,))?;
            for (round, (run, last)) in layout.merges().enumerate() {
                let launch = over_passes(ctas(total, MERGE_THREADS as usize), MERGE_THREADS);
                let from_spare = (round % 2) as u32;
                merge.launch(
                    stream,
                    launch,
                    (params, run as u32, from_spare, u32::from(last)),
                )?;
            }
        }
        Ok(())
    }
}

/// At least one, so that a row of no tokens still gets its header.
fn ctas(work: usize, per_cta: usize) -> u32 {
    work.div_ceil(per_cta).max(1) as u32
}

/// More rows than any row has are all of them.
fn saturated(rows: usize) -> u32 {
    rows.min(i32::MAX as usize) as u32
}
