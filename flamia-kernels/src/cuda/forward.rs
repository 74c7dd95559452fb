//! The forward pass on Hopper: O and LSE of packed documents from quantised operands.
//!
//! The numbers are those of the CPU's `hopper` profile, up to the hardware's 2^x and the order of the
//! row sum; `forward_sm90.cu` computes them.

use flamia_cuda::{
    Arch, BuildError, Gpu, GpuError, Kernel, Launch, PARAMETERS_HEADER, Source, Stream, header,
    parameters,
};
use flamia_sched::Mask;
use flamia_sched::cuda::{SCHEDULE_HEADER, ScheduleLayout, schedule_defines};
use flamia_sched::work::{HeadSections, Tiling};

use super::layout::{HeadDim, LayoutError, PaddedLayout};
use super::mask;
use super::quantise::Quantised;
use super::tensor::{DeviceTensor, TensorError};

/// The kernel's source.
pub const SOURCE: Source = Source {
    name: "flamia-kernels/src/cuda/forward_sm90.cu",
    text: include_str!("forward_sm90.cu"),
    headers: &[
        header!("e4m3.cuh"),
        header!("fragment.cuh"),
        header!("key_tile.cuh"),
        header!("layout.cuh"),
        header!("output_rows.cuh"),
        header!("prim_sm90.cuh"),
        header!("ptx.cuh"),
        header!("softmax.cuh"),
        header!("tiles.cuh"),
        PARAMETERS_HEADER,
        SCHEDULE_HEADER,
    ],
};

/// Rows of a key tile.
const TILE: u32 = 128;
/// Three warpgroups that compute, and one that loads.
const THREADS: u32 = 4 * 128;
/// Slots of queries in shared memory.
const QUERY_SLOTS: u32 = 2;
/// Scales, work items and barriers take less.
const OTHER_SHARED_BYTES: u32 = 1024;
/// Ones beside the values of a stage: 8 rows for each block of keys.
const ONES_BYTES: u32 = TILE * 8;

parameters! {
    /// What the kernel takes. Strides are in elements.
    struct Parameters {
        q: u64,
        q_scales: u64,
        k: u64,
        k_scales: u64,
        v: u64,
        v_folds: u64,
        o: u64,
        lse: u64,
        items: u64,
        header: u64,
        counter: u64,
        o_token_stride: i64,
        o_head_stride: i64,
        tokens: i32,
        slots: i32,
        heads: u32,
        heads_per_kv_head: u32,
        heads_per_section: u32,
        window: i32,
        scale: f32,
        c: f32,
        tau: f32,
        reserved: u32,
    }
}

/// Query rows of a work item, 64 for each warpgroup that computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemRows {
    /// One warpgroup, which loads keys for itself: three items at a time on a multiprocessor, none of which
    /// waits for another to begin or to end. For short documents.
    R64,
    /// Three warpgroups, which share every tile that is loaded.
    R192,
}

impl ItemRows {
    /// All of them.
    pub const ALL: [ItemRows; 2] = [ItemRows::R64, ItemRows::R192];

    /// The number, with which work lists have to be made.
    pub const fn get(self) -> usize {
        match self {
            ItemRows::R64 => 64,
            ItemRows::R192 => 192,
        }
    }

    /// Items that a CTA computes at a time.
    const fn pipelines(self) -> u32 {
        match self {
            ItemRows::R64 => 3,
            ItemRows::R192 => 1,
        }
    }

    /// Stages of keys and of values in each pipeline's shared memory. Where one warpgroup has them for
    /// itself, keys are free once it has its scores, long before it needs the next.
    const fn stages(self) -> [u32; 2] {
        match self {
            ItemRows::R64 => [1, 2],
            ItemRows::R192 => [4, 4],
        }
    }
}

/// What a kernel is compiled for. The length of a window is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardConfig {
    #[allow(missing_docs)]
    pub head_dim: HeadDim,
    #[allow(missing_docs)]
    pub mask: Mask,
    #[allow(missing_docs)]
    pub item_rows: ItemRows,
}

impl ForwardConfig {
    /// How documents are cut into the work items that the kernel takes.
    pub const fn tiling(&self) -> Tiling {
        Tiling::forward(self.mask).with_item_rows(self.item_rows.get())
    }

    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let [k_stages, v_stages] = self.item_rows.stages();
        let mut defines = schedule_defines();
        defines.extend([
            ("HEAD_DIM", self.head_dim.get().to_string()),
            ("ITEM_ROWS", self.item_rows.get().to_string()),
            ("K_STAGES", k_stages.to_string()),
            ("V_STAGES", v_stages.to_string()),
            ("SHARED_BYTES", self.shared_bytes().to_string()),
            mask::define(self.mask),
        ]);
        defines.extend(Parameters::defines());
        defines
    }

    fn parameters(&self, call: &ForwardCall) -> Result<Parameters, ForwardError> {
        let ForwardCall {
            q,
            k,
            v,
            kv_heads,
            o,
            ..
        } = *call;
        let head_dim = self.head_dim;
        let [tokens, heads, _] = o.shape;
        let [o_token_stride, o_head_stride] = o.row_strides([tokens, heads, head_dim.get()])?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(ForwardError::Heads { heads, kv_heads });
        }
        if call.sections.heads() != heads {
            return Err(ForwardError::Sections {
                sections: call.sections.heads(),
                heads,
            });
        }
        let (c, tau) = (call.c, call.tau);
        let bound = 448f64.log2();
        if c < 0
            || !(0.0..=bound).contains(&f64::from(tau))
            || f64::from(c) + f64::from(tau) > bound
        {
            return Err(ForwardError::Saturates { c, tau });
        }
        if !(call.scale > 0.0 && call.scale.is_finite()) {
            return Err(ForwardError::Scale { scale: call.scale });
        }
        // The layouts of Q and of K and V differ in their heads alone, and have seen that these fit.
        let slots = PaddedLayout::new(tokens, call.documents, heads, head_dim)?.slots();
        let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let image = |operand, image, address: Option<u64>| {
            address.ok_or(ForwardError::MissingImage { operand, image })
        };
        Ok(Parameters {
            q: image("q", "Row", q.row_image)?,
            q_scales: q.scales,
            k: image("k", "Row", k.row_image)?,
            k_scales: k.scales,
            v: image("v", "Transposed", v.transposed_image)?,
            v_folds: v.folds,
            o: o.address,
            lse: call.lse,
            items: call.work.items,
            header: call.work.header,
            counter: call.counter,
            o_token_stride,
            o_head_stride,
            tokens: number(tokens),
            slots: number(slots),
            heads: number(heads).unsigned_abs(),
            heads_per_kv_head: number(heads / kv_heads).unsigned_abs(),
            heads_per_section: number(call.sections.per_section()).unsigned_abs(),
            window: mask::window(self.mask),
            scale: (call.scale * std::f64::consts::LOG2_E) as f32,
            c: c as f32,
            tau,
            reserved: 0,
        })
    }

    const fn shared_bytes(&self) -> u32 {
        let (item_rows, head_dim) = (self.item_rows.get() as u32, self.head_dim.get() as u32);
        let [k_stages, v_stages] = self.item_rows.stages();
        let pipelines = self.item_rows.pipelines();
        // The output's are of two bytes, and leave in two parts where there is no room for whole ones.
        let output = match self.head_dim {
            HeadDim::D64 => 2 * item_rows,
            HeadDim::D128 => item_rows,
        };
        let rows = QUERY_SLOTS * item_rows + (k_stages + v_stages) * TILE + output;
        pipelines * (rows * head_dim + v_stages * ONES_BYTES) + OTHER_SHARED_BYTES
    }
}

/// A kernel that was not built, or a launch that was refused.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// Another chip.
    #[error(
        "the MXFP8 forward kernel runs on Hopper (sm_90a), and the {gpu} is {arch}: there, let the CPU \
         compute the `mxfp8` path with the `hopper` profile"
    )]
    Arch {
        /// The GPU's name.
        gpu: String,
        /// Its architecture.
        arch: Arch,
    },
    /// An operand without the image that the kernel reads.
    #[error("{operand} has no {image} image: quantise it with `Forms::{image}` or `Forms::Both`")]
    MissingImage {
        /// `q`, `k` or `v`.
        operand: &'static str,
        /// `Row` or `Transposed`.
        image: &'static str,
    },
    /// The query heads cannot be shared out among the key/value heads.
    #[error(
        "{heads} query heads cannot share {kv_heads} key/value heads evenly: use a multiple of \
         {kv_heads}"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// Sections that were made for another tensor.
    #[error("the sections are for {sections} heads, and O has {heads}: make them for {heads}")]
    Sections {
        /// Heads of the sections.
        sections: usize,
        /// Heads of O.
        heads: usize,
    },
    /// Probabilities would saturate.
    #[error(
        "c + tau = {c} + {tau} exceeds log2(448) = 8.807, or one of them is negative: probabilities \
         would saturate silently or vanish"
    )]
    Saturates {
        /// Power of two on the probabilities.
        c: i32,
        /// Slack of the running maximum.
        tau: f32,
    },
    /// A softmax scale that turns the order of scores around.
    #[error("the softmax scale is {scale}: use a positive number, such as 1 / sqrt(head_dim)")]
    Scale {
        /// The scale.
        scale: f64,
    },
    #[allow(missing_docs)]
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Build(#[from] BuildError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// Device addresses of a schedule's forward work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardWork {
    /// A `flamia_sched::cuda::ScheduleHeader`.
    pub header: u64,
    /// The items, [`ForwardConfig::tiling`]'s, in any order; longest first is fastest.
    pub items: u64,
}

impl ForwardWork {
    /// Those of a schedule's buffer.
    pub const fn of(layout: &ScheduleLayout, schedule: u64) -> Self {
        Self {
            header: schedule + layout.header as u64,
            items: schedule + layout.forward as u64,
        }
    }
}

/// What a launch reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct ForwardCall {
    /// Q, of which the row image is read.
    pub q: Quantised,
    /// K, of which the row image is read.
    pub k: Quantised,
    /// V, of which the transposed image is read.
    pub v: Quantised,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// O, `[tokens, heads, head_dim]`. Rows of a document are written, and nothing else.
    pub o: DeviceTensor,
    /// LSE, natural logarithms, `f32` `[heads, tokens]`; +∞ for a row that sees no key.
    pub lse: u64,
    /// Documents, empty ones included.
    pub documents: usize,
    /// What there is to do.
    pub work: ForwardWork,
    /// In which order heads are computed.
    pub sections: HeadSections,
    /// Four bytes for dynamic schedules: zero before the first launch, and again after each.
    pub counter: u64,
    /// Softmax scale.
    pub scale: f64,
    /// Probabilities are multiplied by 2^c before they are rounded.
    pub c: i32,
    /// The running maximum is replaced only when a tile exceeds it by more than this power of two.
    pub tau: f32,
}

/// The forward kernel on one GPU. Clones are the same kernel.
#[derive(Clone)]
pub struct Forward {
    kernel: Kernel,
    config: ForwardConfig,
    ctas: u32,
    starts_early: bool,
}

impl Forward {
    /// Compiles and loads it, or finds it compiled.
    ///
    /// # Errors
    /// The GPU is no Hopper, there is no compiler, or the GPU does not load the code.
    pub fn new(gpu: &Gpu, config: ForwardConfig) -> Result<Self, ForwardError> {
        if gpu.arch() != Arch::Sm90a {
            return Err(ForwardError::Arch {
                gpu: gpu.name().to_owned(),
                arch: gpu.arch(),
            });
        }
        let module = gpu.compile(&SOURCE, &config.defines())?;
        let kernel = module.kernel("attention_forward")?;
        kernel.set_shared_limit(config.shared_bytes())?;
        Ok(Self {
            kernel,
            config,
            ctas: gpu.multiprocessors(),
            starts_early: true,
        })
    }

    /// The same kernel; whether its launches begin before what is in front of them on the stream is over,
    /// as those of a new one do. They never read what that has not written yet.
    #[must_use]
    pub fn starting_early(self, starts_early: bool) -> Self {
        Self {
            starts_early,
            ..self
        }
    }

    /// What it was compiled for.
    pub const fn config(&self) -> &ForwardConfig {
        &self.config
    }

    /// Computes O and LSE. Waits for nothing, and can be captured: the launch depends on shapes alone.
    /// The results depend neither on the order of items and heads nor on how they are acquired. Its
    /// start overlaps the end of a quantiser in front of it on the stream.
    ///
    /// # Errors
    /// Something does not fit, or the driver refuses the launch.
    ///
    /// # Safety
    /// - The stream is one of the kernel's GPU, and this value, or a clone, is kept until the work has
    ///   run (in a graph: until the last replay has).
    /// - Until then everything behind the addresses is valid memory of that GPU, and nothing else
    ///   writes what is read or touches O, LSE and the counter.
    /// - The operands were quantised for the same boundaries, and hold as many tokens and documents, and
    ///   the heads and head dimension that the call says.
    /// - The work is that of the same boundaries, cut by [`ForwardConfig::tiling`].
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        call: &ForwardCall,
    ) -> Result<(), ForwardError> {
        let parameters = self.config.parameters(call)?;
        if parameters.tokens == 0 || parameters.heads == 0 {
            return Ok(());
        }
        let launch = Launch {
            starts_early: self.starts_early,
            ..Launch::linear(self.ctas, THREADS).with_shared(self.config.shared_bytes())
        };
        // SAFETY: the kernel waits for what is in front of it. The parameters are the kernel's, which the
        // compiler compared field by field; every
        // address in them is the caller's, who vouches for the memory behind it.
        unsafe { self.kernel.launch(stream, launch, (parameters,))? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    const CONFIG: ForwardConfig = ForwardConfig {
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
        item_rows: ItemRows::R192,
    };

    fn sections(heads: usize) -> HeadSections {
        HeadSections::whole(NonZero::new(heads).unwrap())
    }

    /// A call with addresses of nothing.
    fn call() -> ForwardCall {
        let operand = Quantised {
            row_image: Some(1 << 20),
            transposed_image: Some(2 << 20),
            row_sums: None,
            lse2: None,
            scales: 3 << 20,
            folds: 4 << 20,
        };
        ForwardCall {
            q: operand,
            k: operand,
            v: operand,
            kv_heads: 2,
            o: DeviceTensor::packed("o", 5 << 20, [100, 8, 128]),
            lse: 6 << 20,
            documents: 3,
            work: ForwardWork {
                header: 7 << 20,
                items: 8 << 20,
            },
            sections: sections(8),
            counter: 9 << 20,
            scale: 0.5,
            c: 4,
            tau: 4.0,
        }
    }

    #[test]
    fn parameters_are_the_call_s() {
        let mut call = call();
        call.q.transposed_image = None;
        call.k.transposed_image = None;
        call.v.row_image = None;
        let parameters = CONFIG.parameters(&call).unwrap();
        assert_eq!(
            [parameters.q, parameters.k, parameters.v],
            [1 << 20, 1 << 20, 2 << 20]
        );
        assert_eq!((parameters.tokens, parameters.slots), (100, 128 + 3 * 32));
        assert_eq!((parameters.heads, parameters.heads_per_kv_head), (8, 4));
        assert_eq!(parameters.scale, 0.5 * std::f32::consts::LOG2_E);
        assert_eq!(parameters.window, 0);
        let windowed = ForwardConfig {
            mask: Mask::window(usize::MAX),
            ..CONFIG
        };
        let window = windowed.parameters(&call).unwrap().window;
        assert!(window > i32::MAX / 2 && window.checked_add(192).is_some());
    }

    #[test]
    fn shared_memory_suffices_on_hopper() {
        for head_dim in [HeadDim::D64, HeadDim::D128] {
            for item_rows in ItemRows::ALL {
                let config = ForwardConfig {
                    head_dim,
                    item_rows,
                    ..CONFIG
                };
                assert!(config.shared_bytes() <= 227 << 10, "{config:?}");
            }
        }
    }

    #[test]
    fn calls_that_make_no_sense_are_refused_with_their_numbers() {
        let change = |change: &dyn Fn(&mut ForwardCall)| {
            let mut call = call();
            change(&mut call);
            CONFIG.parameters(&call).unwrap_err().to_string()
        };
        let refused = [
            (
                change(&|call| call.q.row_image = None),
                "q has no Row image",
            ),
            (
                change(&|call| call.v.transposed_image = None),
                "v has no Transposed image",
            ),
            (
                change(&|call| call.kv_heads = 3),
                "8 query heads cannot share 3",
            ),
            (
                change(&|call| call.kv_heads = 0),
                "8 query heads cannot share 0",
            ),
            (
                change(&|call| call.sections = sections(4)),
                "for 4 heads, and O has 8",
            ),
            (change(&|call| call.c = 5), "5 + 4"),
            (change(&|call| call.tau = f32::NAN), "NaN"),
            (change(&|call| call.c = -1), "-1 + 4"),
            (change(&|call| call.scale = -0.5), "-0.5"),
            (change(&|call| call.scale = f64::INFINITY), "inf"),
            (change(&|call| call.o.shape[2] = 64), "[100, 8, 64]"),
            (change(&|call| call.documents = usize::MAX), "padded rows"),
        ];
        for (message, part) in refused {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}
