//! dK and dV on Hopper: the first of the two kernels of the backward pass.
//!
//! The numbers are those of the CPU's `hopper` profile with the accumulator of Hopper's MMA, up to the
//! hardware's 2^x; `backward_keys_sm90.cu` computes them. Every gradient is added up by one CTA in one
//! order, so that results are the same bits in every run.
//!
//! dK and dV are not promoted out of the MMA's accumulator, which truncates: where dO has a mean, dV of
//! long documents comes out short (by 1.4 % at 1,024 tokens and 6 % at 4,096 for a mean of one standard
//! deviation; `bench/LOG.md` has more). The CPU shows it with `MmaAccumulator::Hopper`.

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
    name: "flamia-kernels/src/cuda/backward_keys_sm90.cu",
    text: include_str!("backward_keys_sm90.cu"),
    headers: &[
        header!("block_scale.cuh"),
        header!("e4m3.cuh"),
        header!("fragment.cuh"),
        header!("key_items_sm90.cuh"),
        header!("key_rows.cuh"),
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

/// Keys of a work item.
pub(super) const ITEM_KEYS: u32 = 128;
/// Queries of a tile.
pub(super) const QUERIES: u32 = 64;
/// Slots of keys and values in shared memory.
const KEY_SLOTS: u32 = 2;
/// Stages of query tiles in shared memory; a power of two.
const STAGES: u32 = 4;
/// A block of zeros, row tables, scales, work items and barriers take less.
pub(super) const OTHER_SHARED_BYTES: u32 = 7 * 1024;
/// Two warpgroups that compute and one that loads.
pub(super) const THREADS: u32 = 384;

parameters! {
    /// What the kernel takes. Strides are in elements.
    pub(super) struct Parameters {
        q: u64,
        q_transposed: u64,
        q_scales: u64,
        d_o: u64,
        d_o_transposed: u64,
        d_o_scales: u64,
        d_o_folds: u64,
        row_sums: u64,
        lse2: u64,
        k: u64,
        k_scales: u64,
        v: u64,
        v_scales: u64,
        dk: u64,
        dv: u64,
        items: u64,
        header: u64,
        counter: u64,
        dk_token_stride: i64,
        dk_head_stride: i64,
        dv_token_stride: i64,
        dv_head_stride: i64,
        slots: i32,
        kv_heads: u32,
        heads_per_kv_head: u32,
        kv_heads_per_section: u32,
        window: i32,
        scale: f32,
        dk_scale: f32,
        hysteresis: i32,
    }
}

/// What a kernel is compiled for. The length of a window is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardKeysConfig {
    #[allow(missing_docs)]
    pub head_dim: HeadDim,
    #[allow(missing_docs)]
    pub mask: Mask,
    /// Whether Q and K were rotated by the Hadamard matrix, so that dK has to be rotated back.
    pub rotated: bool,
}

impl BackwardKeysConfig {
    /// How documents are cut into the work items that the kernel takes.
    pub const fn tiling(&self) -> Tiling {
        Tiling::backward(self.mask)
    }

    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = self.common_defines(STAGES, self.shared_bytes());
        defines.extend(Parameters::defines());
        defines
    }

    /// Those of `key_items_sm90.cuh`.
    pub(super) fn common_defines(
        &self,
        stages: u32,
        shared_bytes: u32,
    ) -> Vec<(&'static str, String)> {
        let mut defines = schedule_defines();
        defines.extend([
            ("HEAD_DIM", self.head_dim.get().to_string()),
            ("STAGES", stages.to_string()),
            ("SHARED_BYTES", shared_bytes.to_string()),
            mask::define(self.mask),
            ("ROTATED", u8::from(self.rotated).to_string()),
        ]);
        defines
    }

    fn parameters(&self, call: &BackwardKeysCall) -> Result<Parameters, BackwardKeysError> {
        let q_transposed = call
            .q
            .transposed_image
            .ok_or(BackwardKeysError::MissingPart {
                operand: "q",
                part: "transposed image",
            })?;
        self.parameters_with(call, q_transposed)
    }

    /// With Q's transposed image somewhere else, or nowhere.
    pub(super) fn parameters_with(
        &self,
        call: &BackwardKeysCall,
        q_transposed: u64,
    ) -> Result<Parameters, BackwardKeysError> {
        let BackwardKeysCall {
            q,
            k,
            v,
            d_o,
            heads,
            dk,
            dv,
            ..
        } = *call;
        let head_dim = self.head_dim;
        let [tokens, kv_heads, _] = dk.shape;
        let shape = [tokens, kv_heads, head_dim.get()];
        let [dk_token_stride, dk_head_stride] = dk.row_strides(shape)?;
        let [dv_token_stride, dv_head_stride] = dv.row_strides(shape)?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(BackwardKeysError::Heads { heads, kv_heads });
        }
        if call.sections.heads() != kv_heads {
            return Err(BackwardKeysError::Sections {
                sections: call.sections.heads(),
                kv_heads,
            });
        }
        if !(1..=32).contains(&call.hysteresis) {
            return Err(BackwardKeysError::Hysteresis {
                hysteresis: call.hysteresis,
            });
        }
        if !(call.scale > 0.0 && call.scale.is_finite()) {
            return Err(BackwardKeysError::Scale { scale: call.scale });
        }
        // The layouts of Q, dO and of K, V differ in their heads alone, and have seen that these fit.
        let slots = PaddedLayout::new(tokens, call.documents, heads, head_dim)?.slots();
        let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let part = |operand, part, address: Option<u64>| {
            address.ok_or(BackwardKeysError::MissingPart { operand, part })
        };
        let unrotate = if self.rotated {
            1.0 / (head_dim.get() as f64).sqrt()
        } else {
            1.0
        };
        Ok(Parameters {
            q: part("q", "row image", q.row_image)?,
            q_transposed,
            q_scales: q.scales,
            d_o: part("d_o", "row image", d_o.row_image)?,
            d_o_transposed: part("d_o", "transposed image", d_o.transposed_image)?,
            d_o_scales: d_o.scales,
            d_o_folds: d_o.folds,
            row_sums: part("d_o", "row sums", d_o.row_sums)?,
            lse2: part("d_o", "LSE", d_o.lse2)?,
            k: part("k", "row image", k.row_image)?,
            k_scales: k.scales,
            v: part("v", "row image", v.row_image)?,
            v_scales: v.scales,
            dk: dk.address,
            dv: dv.address,
            items: call.work.items,
            header: call.work.header,
            counter: call.counter,
            dk_token_stride,
            dk_head_stride,
            dv_token_stride,
            dv_head_stride,
            slots: number(slots),
            kv_heads: number(kv_heads).unsigned_abs(),
            heads_per_kv_head: number(heads / kv_heads).unsigned_abs(),
            kv_heads_per_section: number(call.sections.per_section()).unsigned_abs(),
            window: mask::window(self.mask),
            scale: (call.scale * std::f64::consts::LOG2_E) as f32,
            dk_scale: (call.scale * unrotate) as f32,
            hysteresis: call.hysteresis,
        })
    }

    const fn shared_bytes(&self) -> u32 {
        // Rows of codes: K and V, and both images of Q and of dO.
        let rows = KEY_SLOTS * 2 * ITEM_KEYS + STAGES * 4 * QUERIES;
        rows * self.head_dim.get() as u32 + OTHER_SHARED_BYTES
    }
}

/// A kernel that was not built, or a launch that was refused.
#[derive(Debug, thiserror::Error)]
pub enum BackwardKeysError {
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
        "{operand} has no {part}: quantise Q with `Forms::Both`, K and V with `Forms::Row` or \
         `Forms::Both`, and dO with `Forms::BothWithRowSums`"
    )]
    MissingPart {
        /// `q`, `k`, `v` or `d_o`.
        operand: &'static str,
        /// What is missing.
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
    #[error(
        "the sections are for {sections} heads, and dK has {kv_heads}: make them for {kv_heads} \
         key/value heads"
    )]
    Sections {
        /// Heads of the sections.
        sections: usize,
        /// Heads of dK.
        kv_heads: usize,
    },
    /// A hysteresis with which references of dS would follow every tile, or none.
    #[error("the hysteresis of dS is {hysteresis} powers of two: use 1 to 32")]
    Hysteresis {
        /// The hysteresis.
        hysteresis: i32,
    },
    /// A softmax scale that no forward pass has.
    #[error("the softmax scale is {scale}: use the forward pass's, a positive number")]
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

/// Device addresses of a schedule's backward work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardWork {
    /// A `flamia_sched::cuda::ScheduleHeader`.
    pub header: u64,
    /// The items, [`BackwardKeysConfig::tiling`]'s, in any order; longest first is fastest.
    pub items: u64,
}

impl BackwardWork {
    /// Those of a schedule's buffer.
    pub const fn of(layout: &ScheduleLayout, schedule: u64) -> Self {
        Self {
            header: schedule + layout.header as u64,
            items: schedule + layout.backward as u64,
        }
    }
}

/// What a launch reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct BackwardKeysCall {
    /// Q, of which both images are read.
    pub q: Quantised,
    /// K, of which the row image is read.
    pub k: Quantised,
    /// V, of which the row image is read.
    pub v: Quantised,
    /// dO, of which both images, D and LSE are read.
    pub d_o: Quantised,
    /// Heads of Q and dO.
    pub heads: usize,
    /// dK, `[tokens, kv_heads, head_dim]`. Rows of a document are written, and nothing else.
    pub dk: DeviceTensor,
    /// dV, of the same shape; the same.
    pub dv: DeviceTensor,
    /// Documents, empty ones included.
    pub documents: usize,
    /// What there is to do.
    pub work: BackwardWork,
    /// In which order key/value heads are computed.
    pub sections: HeadSections,
    /// Four bytes for dynamic schedules: zero before the first launch, and again after each.
    pub counter: u64,
    /// Softmax scale.
    pub scale: f64,
    /// A key's reference of dS is lowered when a tile falls under 2^-hysteresis of the largest code.
    pub hysteresis: i32,
}

pub(super) fn require_hopper(gpu: &Gpu) -> Result<(), BackwardKeysError> {
    if gpu.arch() == Arch::Sm90a {
        Ok(())
    } else {
        Err(BackwardKeysError::Arch {
            gpu: gpu.name().to_owned(),
            arch: gpu.arch(),
        })
    }
}

/// The kernel on one GPU. Clones are the same kernel.
#[derive(Clone)]
pub struct BackwardKeys {
    kernel: Kernel,
    config: BackwardKeysConfig,
    ctas: u32,
    starts_early: bool,
}

impl BackwardKeys {
    /// Compiles and loads it, or finds it compiled.
    ///
    /// # Errors
    /// The GPU is no Hopper, there is no compiler, or the GPU does not load the code.
    pub fn new(gpu: &Gpu, config: BackwardKeysConfig) -> Result<Self, BackwardKeysError> {
        require_hopper(gpu)?;
        let module = gpu.compile(&SOURCE, &config.defines())?;
        let kernel = module.kernel("attention_backward_keys")?;
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
    pub const fn config(&self) -> &BackwardKeysConfig {
        &self.config
    }

    /// Computes dK and dV. Waits for nothing, and can be captured: the launch depends on shapes alone.
    /// The results depend neither on the order of items and heads nor on how they are acquired.
    ///
    /// # Errors
    /// Something does not fit, or the driver refuses the launch.
    ///
    /// # Safety
    /// - The stream is one of the kernel's GPU, and this value, or a clone, is kept until the work has
    ///   run (in a graph: until the last replay has).
    /// - Until then everything behind the addresses is valid memory of that GPU, and nothing else
    ///   writes what is read or touches dK, dV and the counter.
    /// - The operands were quantised for the same boundaries, and hold as many tokens and documents, and
    ///   the heads and head dimension that the call says.
    /// - The work is that of the same boundaries, cut by [`BackwardKeysConfig::tiling`].
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        call: &BackwardKeysCall,
    ) -> Result<(), BackwardKeysError> {
        let parameters = self.config.parameters(call)?;
        if call.dk.shape[0] == 0 || call.heads == 0 {
            return Ok(());
        }
        let launch = Launch {
            starts_early: self.starts_early,
            ..Launch::linear(self.ctas, THREADS).with_shared(self.config.shared_bytes())
        };
        // SAFETY: the kernel waits for what is in front of it. The parameters are the kernel's, which the compiler compared field by field; every
        // address in them is the caller's, who vouches for the memory behind it.
        unsafe { self.kernel.launch(stream, launch, (parameters,))? };
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::num::NonZero;

    use super::*;

    const CONFIG: BackwardKeysConfig = BackwardKeysConfig {
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
        rotated: true,
    };

    fn sections(heads: usize) -> HeadSections {
        HeadSections::new(NonZero::new(heads).unwrap(), NonZero::new(3).unwrap())
    }

    /// A call with addresses of nothing.
    pub(in crate::cuda) fn call() -> BackwardKeysCall {
        let operand = |first: u64| Quantised {
            row_image: Some(first << 20),
            transposed_image: Some((first + 1) << 20),
            row_sums: None,
            lse2: None,
            scales: (first + 2) << 20,
            folds: (first + 3) << 20,
        };
        BackwardKeysCall {
            q: operand(10),
            k: operand(20),
            v: operand(30),
            d_o: Quantised {
                row_sums: Some(44 << 20),
                lse2: Some(45 << 20),
                ..operand(40)
            },
            heads: 8,
            dk: DeviceTensor::packed("dk", 5 << 20, [100, 4, 128]),
            dv: DeviceTensor {
                strides: [2048, 256, 1],
                ..DeviceTensor::packed("dv", 6 << 20, [100, 4, 128])
            },
            documents: 3,
            work: BackwardWork {
                header: 7 << 20,
                items: 8 << 20,
            },
            sections: sections(4),
            counter: 9 << 20,
            scale: 0.5,
            hysteresis: 3,
        }
    }

    #[test]
    fn parameters_are_the_call_s() {
        let mut call = call();
        call.k.transposed_image = None;
        call.v.transposed_image = None;
        let parameters = CONFIG.parameters(&call).unwrap();
        let images = [
            parameters.q,
            parameters.q_transposed,
            parameters.d_o,
            parameters.d_o_transposed,
            parameters.k,
            parameters.v,
        ];
        assert_eq!(images, [10, 11, 40, 41, 20, 30].map(|part| part << 20));
        assert_eq!([parameters.row_sums, parameters.lse2], [44 << 20, 45 << 20]);
        let strides = [parameters.dk_token_stride, parameters.dk_head_stride];
        assert_eq!(strides, [512, 128]);
        let strides = [parameters.dv_token_stride, parameters.dv_head_stride];
        assert_eq!(strides, [2048, 256]);
        assert_eq!(
            (
                parameters.kv_heads,
                parameters.heads_per_kv_head,
                parameters.kv_heads_per_section
            ),
            (4, 2, 3)
        );
        let padded = PaddedLayout::new(100, 3, 8, HeadDim::D128).unwrap();
        assert_eq!(parameters.slots as usize, padded.slots());
        assert_eq!(parameters.scale, 0.5 * std::f32::consts::LOG2_E);
        assert_eq!(parameters.dk_scale, (0.5 / 128f64.sqrt()) as f32);
        assert_eq!(
            [parameters.d_o_scales, parameters.d_o_folds],
            [42 << 20, 43 << 20]
        );
    }

    #[test]
    fn what_the_kernel_cannot_compute_is_refused() {
        let refused = |change: &dyn Fn(&mut BackwardKeysCall)| {
            let mut call = call();
            change(&mut call);
            CONFIG.parameters(&call).unwrap_err().to_string()
        };
        for (told, part) in [
            (
                refused(&|call| call.q.transposed_image = None),
                "q has no transposed image",
            ),
            (refused(&|call| call.d_o.lse2 = None), "d_o has no LSE"),
            (
                refused(&|call| call.v.row_image = None),
                "v has no row image",
            ),
            (refused(&|call| call.heads = 6), "6 query heads"),
            (refused(&|call| call.sections = sections(8)), "for 8 heads"),
            (
                refused(&|call| call.hysteresis = 0),
                "hysteresis of dS is 0",
            ),
            (
                refused(&|call| call.scale = f64::NAN),
                "softmax scale is NaN",
            ),
            (refused(&|call| call.dv.shape[0] = 99), "[99, 4, 128]"),
            (refused(&|call| call.dv.strides[0] = 2047), "multiples of 8"),
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[test]
    fn shared_memory_suffices_for_every_head_dimension() {
        for head_dim in [HeadDim::D64, HeadDim::D128] {
            assert!(BackwardKeysConfig { head_dim, ..CONFIG }.shared_bytes() <= 232_448);
        }
    }
}
