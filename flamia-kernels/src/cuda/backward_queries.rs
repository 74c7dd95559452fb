//! The half of the backward pass on Hopper that walks keys: dQ of packed documents.
//!
//! The numbers are those of the CPU's `hopper` profile, up to the hardware's 2^x;
//! `backward_queries_sm90.cu` computes them. dQ is accumulated over all keys in the tensor core's own
//! accumulator, which keeps 13 fraction bits.

use flamia_cuda::{
    Arch, BuildError, Gpu, GpuError, Kernel, Launch, PARAMETERS_HEADER, Source, Stream, header,
    parameters,
};
use flamia_sched::Mask;
use flamia_sched::cuda::{SCHEDULE_HEADER, schedule_defines};
use flamia_sched::work::{HeadSections, Tiling};

use super::backward_keys::BackwardWork;
use super::layout::{HeadDim, LayoutError, PaddedLayout};
use super::mask;
use super::quantise::Quantised;
use super::tensor::{DeviceTensor, TensorError};

/// The kernel's source.
pub const SOURCE: Source = Source {
    name: "flamia-kernels/src/cuda/backward_queries_sm90.cu",
    text: include_str!("backward_queries_sm90.cu"),
    headers: &[
        header!("block_scale.cuh"),
        header!("e4m3.cuh"),
        header!("fragment.cuh"),
        header!("key_tile.cuh"),
        header!("layout.cuh"),
        header!("output_rows.cuh"),
        header!("prim_sm90.cuh"),
        header!("ptx.cuh"),
        header!("running_reference.cuh"),
        header!("tiles.cuh"),
        PARAMETERS_HEADER,
        SCHEDULE_HEADER,
    ],
};

/// Query rows of a work item, and keys of a tile.
const ROWS: u32 = 128;
/// Slots of queries in shared memory.
const QUERY_SLOTS: u32 = 2;
/// Stages of key tiles in shared memory.
const STAGES: u32 = 3;
/// Row sums, scales, work and barriers take less.
const OTHER_SHARED_BYTES: u32 = 3072;
/// A warpgroup that loads and two that compute.
const THREADS: u32 = 3 * 128;

parameters! {
    /// What the kernel takes. Strides are in elements.
    struct Parameters {
        q: u64,
        q_scales: u64,
        d_o: u64,
        d_o_scales: u64,
        row_sums: u64,
        lse2: u64,
        k: u64,
        k_transposed: u64,
        k_scales: u64,
        v: u64,
        v_scales: u64,
        dq: u64,
        items: u64,
        header: u64,
        counter: u64,
        dq_token_stride: i64,
        dq_head_stride: i64,
        slots: i32,
        heads: u32,
        heads_per_kv_head: u32,
        heads_per_section: u32,
        window: i32,
        hysteresis: i32,
        scale: f32,
        scale_log2: f32,
    }
}

/// What a kernel is compiled for. The length of a window is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardQueriesConfig {
    #[allow(missing_docs)]
    pub head_dim: HeadDim,
    #[allow(missing_docs)]
    pub mask: Mask,
    /// Whether Q and K were rotated by the Hadamard matrix, so that dQ has to be rotated back.
    pub rotated: bool,
}

impl BackwardQueriesConfig {
    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = schedule_defines();
        defines.extend([
            ("HEAD_DIM", self.head_dim.get().to_string()),
            ("ROTATED", u8::from(self.rotated).to_string()),
            ("STAGES", STAGES.to_string()),
            ("SHARED_BYTES", self.shared_bytes().to_string()),
            mask::define(self.mask),
        ]);
        defines.extend(Parameters::defines());
        defines
    }

    /// How documents are cut into the work items whose list the kernel takes: that of dK and dV, which it
    /// reads from the other end of each document.
    pub const fn tiling(&self) -> Tiling {
        Tiling::backward(self.mask).with_item_rows(ROWS as usize)
    }

    fn parameters(&self, call: &BackwardQueriesCall) -> Result<Parameters, BackwardQueriesError> {
        let BackwardQueriesCall {
            q,
            d_o,
            k,
            v,
            kv_heads,
            dq,
            scale,
            hysteresis,
            ..
        } = *call;
        let head_dim = self.head_dim;
        let [tokens, heads, _] = dq.shape;
        let [dq_token_stride, dq_head_stride] = dq.row_strides([tokens, heads, head_dim.get()])?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(BackwardQueriesError::Heads { heads, kv_heads });
        }
        if call.sections.heads() != heads {
            return Err(BackwardQueriesError::Sections {
                sections: call.sections.heads(),
                heads,
            });
        }
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(BackwardQueriesError::Scale { scale });
        }
        if !(1..=32).contains(&hysteresis) {
            return Err(BackwardQueriesError::Hysteresis { hysteresis });
        }
        // The layouts of the query side and of K and V differ in their heads alone, and have seen that
        // these fit.
        let slots = PaddedLayout::new(tokens, call.documents, heads, head_dim)?.slots();
        let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let part = |operand, part, address: Option<u64>| {
            address.ok_or(BackwardQueriesError::MissingPart { operand, part })
        };
        Ok(Parameters {
            q: part("q", "row image", q.row_image)?,
            q_scales: q.scales,
            d_o: part("d_o", "row image", d_o.row_image)?,
            d_o_scales: d_o.scales,
            row_sums: part("d_o", "D", d_o.row_sums)?,
            lse2: part("d_o", "LSE", d_o.lse2)?,
            k: part("k", "row image", k.row_image)?,
            k_transposed: part("k", "transposed image", k.transposed_image)?,
            k_scales: k.scales,
            v: part("v", "row image", v.row_image)?,
            v_scales: v.scales,
            dq: dq.address,
            items: call.work.items,
            header: call.work.header,
            counter: call.counter,
            dq_token_stride,
            dq_head_stride,
            slots: number(slots),
            heads: number(heads).unsigned_abs(),
            heads_per_kv_head: number(heads / kv_heads).unsigned_abs(),
            heads_per_section: number(call.sections.per_section()).unsigned_abs(),
            window: mask::window(self.mask),
            hysteresis,
            scale: scale as f32,
            scale_log2: (scale * std::f64::consts::LOG2_E) as f32,
        })
    }

    const fn shared_bytes(&self) -> u32 {
        // Rows of codes: Q and dO; K, its transposed image and V; a block of zeros.
        let rows = QUERY_SLOTS * 2 * ROWS + STAGES * 3 * ROWS + 32;
        rows * self.head_dim.get() as u32 + OTHER_SHARED_BYTES
    }
}

/// A kernel that was not built, or a launch that was refused.
#[derive(Debug, thiserror::Error)]
pub enum BackwardQueriesError {
    /// Another chip.
    #[error(
        "the MXFP8 backward kernels run on Hopper (sm_90a), and the {gpu} is {arch}: there, let the CPU \
         compute the `mxfp8` path with the `hopper` profile"
    )]
    Arch {
        /// The GPU's name.
        gpu: String,
        /// Its architecture.
        arch: Arch,
    },
    /// An operand without something that the kernel reads.
    #[error(
        "{operand} has no {part}: quantise it with `Forms::BothWithRowSums` if it is d_o, else with \
         `Forms::Both`"
    )]
    MissingPart {
        /// `q`, `d_o`, `k` or `v`.
        operand: &'static str,
        /// An image or a table.
        part: &'static str,
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
    #[error("the sections are for {sections} heads, and dQ has {heads}: make them for {heads}")]
    Sections {
        /// Heads of the sections.
        sections: usize,
        /// Heads of dQ.
        heads: usize,
    },
    /// A softmax scale that turns the order of scores around.
    #[error("the softmax scale is {scale}: use a positive number, such as 1 / sqrt(head_dim)")]
    Scale {
        /// The scale.
        scale: f64,
    },
    /// References that would never fall, or always move.
    #[error("the hysteresis of dS references is {hysteresis}: use a number from 1 to 32")]
    Hysteresis {
        /// The hysteresis.
        hysteresis: i32,
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

/// What a launch reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct BackwardQueriesCall {
    /// Q, of which the row image is read.
    pub q: Quantised,
    /// dO, of which the row image, D and LSE are read.
    pub d_o: Quantised,
    /// K, of which both images are read.
    pub k: Quantised,
    /// V, of which the row image is read.
    pub v: Quantised,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// dQ, `[tokens, heads, head_dim]`. Rows of a document are written, and nothing else.
    pub dq: DeviceTensor,
    /// Documents, empty ones included.
    pub documents: usize,
    /// What there is to do.
    pub work: BackwardWork,
    /// In which order heads are computed.
    pub sections: HeadSections,
    /// Four bytes for dynamic schedules: zero before the first launch, and again after each.
    pub counter: u64,
    /// Softmax scale.
    pub scale: f64,
    /// A row's reference is lowered when a tile of dS falls under 2^-hysteresis of the largest code.
    pub hysteresis: i32,
}

/// The kernel on one GPU. Clones are the same kernel.
#[derive(Clone)]
pub struct BackwardQueries {
    kernel: Kernel,
    config: BackwardQueriesConfig,
    ctas: u32,
}

impl BackwardQueries {
    /// Compiles and loads it, or finds it compiled.
    ///
    /// # Errors
    /// The GPU is no Hopper, there is no compiler, or the GPU does not load the code.
    pub fn new(gpu: &Gpu, config: BackwardQueriesConfig) -> Result<Self, BackwardQueriesError> {
        if gpu.arch() != Arch::Sm90a {
            return Err(BackwardQueriesError::Arch {
                gpu: gpu.name().to_owned(),
                arch: gpu.arch(),
            });
        }
        let module = gpu.compile(&SOURCE, &config.defines())?;
        let kernel = module.kernel("attention_backward_queries")?;
        kernel.set_shared_limit(config.shared_bytes())?;
        Ok(Self {
            kernel,
            config,
            ctas: gpu.multiprocessors(),
        })
    }

    /// What it was compiled for.
    pub const fn config(&self) -> &BackwardQueriesConfig {
        &self.config
    }

    /// Computes dQ. Waits for nothing, and can be captured: the launch depends on shapes alone. The
    /// results depend neither on the order of items and heads nor on how they are acquired.
    ///
    /// # Errors
    /// Something does not fit, or the driver refuses the launch.
    ///
    /// # Safety
    /// - The stream is one of the kernel's GPU, and this value, or a clone, is kept until the work has
    ///   run (in a graph: until the last replay has).
    /// - Until then everything behind the addresses is valid memory of that GPU, and nothing else
    ///   writes what is read or touches dQ and the counter.
    /// - The operands were quantised for the same boundaries, and hold as many tokens and documents, and
    ///   the heads and head dimension that the call says.
    /// - The work is that of the same boundaries, cut by [`BackwardQueriesConfig::tiling`].
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        call: &BackwardQueriesCall,
    ) -> Result<(), BackwardQueriesError> {
        // SAFETY: the caller's word.
        unsafe { self.launch_as(stream, call, false) }
    }

    /// As [`BackwardQueries::launch`], given to the stream right after a
    /// [`BackwardKeys`](super::backward_keys::BackwardKeys), whose last items are still computed while this
    /// kernel begins.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there; and the two have a counter each.
    pub unsafe fn launch_after_keys(
        &self,
        stream: Stream<'_>,
        call: &BackwardQueriesCall,
    ) -> Result<(), BackwardQueriesError> {
        // SAFETY: the caller's word. What this kernel reads was there before the one in front began.
        unsafe { self.launch_as(stream, call, true) }
    }

    unsafe fn launch_as(
        &self,
        stream: Stream<'_>,
        call: &BackwardQueriesCall,
        starts_early: bool,
    ) -> Result<(), BackwardQueriesError> {
        let parameters = self.config.parameters(call)?;
        if call.dq.shape[0] == 0 || parameters.heads == 0 {
            return Ok(());
        }
        let launch = Launch {
            starts_early,
            ..Launch::linear(self.ctas, THREADS).with_shared(self.config.shared_bytes())
        };
        // SAFETY: the parameters are the kernel's, which the compiler compared field by field; every
        // address in them is the caller's, who vouches for the memory behind it.
        unsafe { self.kernel.launch(stream, launch, (parameters,))? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    const CONFIG: BackwardQueriesConfig = BackwardQueriesConfig {
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
        rotated: true,
    };

    fn sections(heads: usize) -> HeadSections {
        HeadSections::whole(NonZero::new(heads).unwrap())
    }

    /// A call with addresses of nothing.
    fn call() -> BackwardQueriesCall {
        let operand = Quantised {
            row_image: Some(1 << 20),
            transposed_image: Some(2 << 20),
            row_sums: Some(10 << 20),
            lse2: Some(11 << 20),
            scales: 3 << 20,
            folds: 4 << 20,
        };
        BackwardQueriesCall {
            q: operand,
            d_o: operand,
            k: operand,
            v: operand,
            kv_heads: 2,
            dq: DeviceTensor::packed("dq", 5 << 20, [100, 8, 128]),
            documents: 3,
            work: BackwardWork {
                header: 7 << 20,
                items: 8 << 20,
            },
            sections: sections(8),
            counter: 9 << 20,
            scale: 0.5,
            hysteresis: 3,
        }
    }

    #[test]
    fn parameters_are_the_call_s() {
        let mut call = call();
        call.q.transposed_image = None;
        call.d_o.transposed_image = None;
        call.v.transposed_image = None;
        let parameters = CONFIG.parameters(&call).unwrap();
        assert_eq!([parameters.k, parameters.k_transposed], [1 << 20, 2 << 20]);
        assert_eq!([parameters.row_sums, parameters.lse2], [10 << 20, 11 << 20]);
        assert_eq!(parameters.slots, 128 + 3 * 32);
        assert_eq!((parameters.heads, parameters.heads_per_kv_head), (8, 4));
        assert_eq!((parameters.scale, parameters.hysteresis), (0.5, 3));
        assert_eq!(parameters.scale_log2, 0.5 * std::f32::consts::LOG2_E);
        assert_eq!(parameters.window, 0);
        let windowed = BackwardQueriesConfig {
            mask: Mask::window(usize::MAX),
            ..CONFIG
        };
        let window = windowed.parameters(&call).unwrap().window;
        assert!(window > i32::MAX / 2 && window.checked_add(192).is_some());
    }

    #[test]
    fn shared_memory_suffices_on_hopper() {
        for head_dim in [HeadDim::D64, HeadDim::D128] {
            let config = BackwardQueriesConfig { head_dim, ..CONFIG };
            assert!(config.shared_bytes() <= 227 << 10, "{config:?}");
        }
    }

    #[test]
    fn calls_that_make_no_sense_are_refused_with_their_numbers() {
        let change = |change: &dyn Fn(&mut BackwardQueriesCall)| {
            let mut call = call();
            change(&mut call);
            CONFIG.parameters(&call).unwrap_err().to_string()
        };
        let refused = [
            (
                change(&|call| call.q.row_image = None),
                "q has no row image",
            ),
            (
                change(&|call| call.k.transposed_image = None),
                "k has no transposed image",
            ),
            (change(&|call| call.d_o.row_sums = None), "d_o has no D"),
            (change(&|call| call.d_o.lse2 = None), "d_o has no LSE"),
            (
                change(&|call| call.v.row_image = None),
                "v has no row image",
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
                "for 4 heads, and dQ has 8",
            ),
            (change(&|call| call.scale = -0.5), "-0.5"),
            (change(&|call| call.scale = f64::INFINITY), "inf"),
            (change(&|call| call.hysteresis = 0), "is 0"),
            (change(&|call| call.dq.shape[2] = 64), "[100, 8, 64]"),
            (change(&|call| call.documents = usize::MAX), "padded rows"),
        ];
        for (message, part) in refused {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
}
