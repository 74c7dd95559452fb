//! dQ, dK and dV on Hopper in one pass over P and dS.
//!
//! Three launches: one prepares the sums of dQ and BF16 values of Q, one computes dK and dV and adds dQ up,
//! and one makes rows of dQ's sums. dV is [`backward_keys`](super::backward_keys)'s to the bit. dQ is added up by
//! many CTAs in the order in which they get there, in FP16 under a power of two that rules an
//! overflow out, or in FP32: its last bits are not the same in every run. The numbers are those of
//! the CPU's `hopper` profile with `Options::backward` set to `one-kernel`.

use flamia_cuda::{
    BuildError, Gpu, GpuError, Kernel, Launch, PARAMETERS_HEADER, Source, Stream, header,
    parameters,
};
use flamia_sched::cuda::SCHEDULE_HEADER;
use flamia_sched::work::Tiling;
use half::bf16;

use super::backward_keys::{
    BackwardKeysCall, BackwardKeysConfig, BackwardKeysError, ITEM_KEYS, OTHER_SHARED_BYTES,
    QUERIES, require_hopper,
};
use super::layout::{LayoutError, PaddedLayout};
use super::tensor::{DeviceTensor, Scratch, ScratchError, TensorError};

/// The kernel's source.
pub const SOURCE: Source = Source {
    name: "flamia-kernels/src/cuda/backward_fused_sm90.cu",
    text: include_str!("backward_fused_sm90.cu"),
    headers: &[
        header!("block_scale.cuh"),
        header!("dq_sums.cuh"),
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

/// The source of what comes before and after it.
pub const SUMS_SOURCE: Source = Source {
    name: "flamia-kernels/src/cuda/dq_sums.cu",
    text: include_str!("dq_sums.cu"),
    headers: &[
        header!("block_rows.cuh"),
        header!("block_scale.cuh"),
        header!("dq_sums.cuh"),
        header!("e4m3.cuh"),
        header!("fragment.cuh"),
        header!("layout.cuh"),
        header!("output_rows.cuh"),
        header!("prim_sm90.cuh"),
        header!("ptx.cuh"),
        PARAMETERS_HEADER,
    ],
};

/// Threads of a CTA that computes: a warpgroup that loads, one of dQ, and two of 64 keys.
const THREADS: u32 = 512;
/// Threads of a CTA that prepares, and runs of 8 codes of Q that each widens.
const PREPARE_THREADS: u32 = 256;
const PREPARE_CHUNKS: u64 = 8;
const CODES_PER_CHUNK: usize = 8;
/// Documents and heads whose exponents a CTA looks for: one for each warp.
const PREPARE_PAIRS: u64 = 8;
/// Threads of a CTA that finishes a block of 32 rows.
const FINISH_THREADS: u32 = 64;

parameters! {
    /// What the kernel takes. Strides are in elements.
    struct Parameters {
        q: u64,
        q_values: u64,
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
        dq: u64,
        key_exponents: u64,
        items: u64,
        header: u64,
        counter: u64,
        dk_token_stride: i64,
        dk_head_stride: i64,
        dv_token_stride: i64,
        dv_head_stride: i64,
        slots: i32,
        documents: i32,
        kv_heads: u32,
        heads_per_kv_head: u32,
        kv_heads_per_section: u32,
        window: i32,
        scale: f32,
        dk_scale: f32,
    }
}

parameters! {
    /// What the kernels before and after it take.
    struct SumParameters {
        q: u64,
        q_scales: u64,
        q_values: u64,
        sums: u64,
        key_exponents: u64,
        d_o_folds: u64,
        k_folds: u64,
        v_folds: u64,
        cu_seqlens: u64,
        dq: u64,
        token_stride: i64,
        head_stride: i64,
        tokens: i32,
        documents: i32,
        heads: i32,
        kv_heads: i32,
        slots: i32,
        scale: f32,
    }
}

/// How dQ is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqSums {
    /// In FP16, under a power of two for each block of 32 queries: half of the traffic.
    Fp16,
    /// In FP32.
    Fp32,
}

impl DqSums {
    /// Both.
    pub const ALL: [DqSums; 2] = [DqSums::Fp16, DqSums::Fp32];

    pub(super) const fn bytes(self) -> u32 {
        match self {
            DqSums::Fp16 => 2,
            DqSums::Fp32 => 4,
        }
    }

    /// Stages of query tiles that fit beside what dQ takes of shared memory.
    const fn stages(self) -> u32 {
        match self {
            DqSums::Fp16 => 3,
            DqSums::Fp32 => 2,
        }
    }
}

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardFusedConfig {
    /// What they have in common with the kernel of dK and dV.
    pub keys: BackwardKeysConfig,
    #[allow(missing_docs)]
    pub sums: DqSums,
}

impl BackwardFusedConfig {
    /// How documents are cut into the work items that the kernel takes.
    pub const fn tiling(&self) -> Tiling {
        self.keys.tiling()
    }

    /// The macros that [`SOURCE`] is compiled with.
    pub fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = self
            .keys
            .common_defines(self.sums.stages(), self.shared_bytes());
        defines.push(("DQ_BYTES", self.sums.bytes().to_string()));
        defines.extend(Parameters::defines());
        defines
    }

    /// The macros that [`SUMS_SOURCE`] is compiled with.
    pub fn sums_defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = vec![
            ("HEAD_DIM", self.keys.head_dim.get().to_string()),
            ("DQ_BYTES", self.sums.bytes().to_string()),
            ("ROTATED", u8::from(self.keys.rotated).to_string()),
        ];
        defines.extend(SumParameters::defines());
        defines
    }

    /// The scratch for `tokens` rows in `documents` documents, empty ones included.
    ///
    /// # Errors
    /// There is no [`PaddedLayout`] for that.
    pub fn scratch(
        &self,
        tokens: usize,
        documents: usize,
        heads: usize,
        kv_heads: usize,
    ) -> Result<FusedScratch, LayoutError> {
        let padded = PaddedLayout::new(tokens, documents, heads, self.keys.head_dim)?;
        let q_values = padded.image_bytes() * self.sums.bytes() as usize;
        let key_exponents = q_values + padded.image_bytes() * size_of::<bf16>();
        Ok(FusedScratch {
            padded,
            q_values,
            key_exponents,
            bytes: key_exponents + kv_heads * documents * size_of::<f32>(),
        })
    }

    const fn shared_bytes(&self) -> u32 {
        let head_dim = self.keys.head_dim.get() as u32;
        // Rows of codes: K, V and, of two bytes, K's values; Q and its values, and both images of dO.
        let rows = 4 * ITEM_KEYS + self.sums.stages() * 5 * QUERIES;
        let ds = QUERIES * ITEM_KEYS * 2;
        let dq = QUERIES * head_dim * self.sums.bytes();
        rows * head_dim + ds + dq + OTHER_SHARED_BYTES
    }

    fn parameters(
        &self,
        call: &BackwardFusedCall,
        scratch: &FusedScratch,
    ) -> Result<(Parameters, SumParameters), BackwardFusedError> {
        let keys = self.keys.parameters_with(&call.keys, 0)?;
        let head_dim = self.keys.head_dim.get();
        let [tokens, kv_heads, _] = call.keys.dk.shape;
        let heads = call.keys.heads;
        let [token_stride, head_stride] = call.dq.row_strides([tokens, heads, head_dim])?;
        call.scratch.check("dq", scratch.bytes)?;
        let sums = call.scratch.address;
        let q_values = sums + scratch.q_values as u64;
        let key_exponents = sums + scratch.key_exponents as u64;
        // The layout has seen that these fit.
        let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let kernel = Parameters {
            q: keys.q,
            q_values,
            q_scales: keys.q_scales,
            d_o: keys.d_o,
            d_o_transposed: keys.d_o_transposed,
            d_o_scales: keys.d_o_scales,
            d_o_folds: keys.d_o_folds,
            row_sums: keys.row_sums,
            lse2: keys.lse2,
            k: keys.k,
            k_scales: keys.k_scales,
            v: keys.v,
            v_scales: keys.v_scales,
            dk: keys.dk,
            dv: keys.dv,
            dq: sums,
            key_exponents,
            items: keys.items,
            header: keys.header,
            counter: keys.counter,
            dk_token_stride: keys.dk_token_stride,
            dk_head_stride: keys.dk_head_stride,
            dv_token_stride: keys.dv_token_stride,
            dv_head_stride: keys.dv_head_stride,
            slots: keys.slots,
            documents: number(call.keys.documents),
            kv_heads: keys.kv_heads,
            heads_per_kv_head: keys.heads_per_kv_head,
            kv_heads_per_section: keys.kv_heads_per_section,
            window: keys.window,
            scale: keys.scale,
            dk_scale: keys.dk_scale,
        };
        let around = SumParameters {
            q: keys.q,
            q_scales: keys.q_scales,
            q_values,
            sums,
            key_exponents,
            d_o_folds: keys.d_o_folds,
            k_folds: call.keys.k.folds,
            v_folds: call.keys.v.folds,
            cu_seqlens: call.cu_seqlens,
            dq: call.dq.address,
            token_stride,
            head_stride,
            tokens: number(tokens),
            documents: number(call.keys.documents),
            heads: number(heads),
            kv_heads: number(kv_heads),
            slots: keys.slots,
            // Q is rotated where K is.
            scale: keys.dk_scale,
        };
        Ok((kernel, around))
    }
}

/// Where the parts of the scratch lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedScratch {
    padded: PaddedLayout,
    q_values: usize,
    key_exponents: usize,
    bytes: usize,
}

impl FusedScratch {
    /// Bytes that it takes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A kernel that was not built, or a launch that was refused.
#[derive(Debug, thiserror::Error)]
pub enum BackwardFusedError {
    #[allow(missing_docs)]
    #[error(transparent)]
    Keys(#[from] BackwardKeysError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Build(#[from] BuildError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// What the launches read and write.
#[derive(Clone, Copy, Debug)]
pub struct BackwardFusedCall {
    /// What the kernel of dK and dV takes, but for Q's transposed image. The hysteresis is of no use here.
    pub keys: BackwardKeysCall,
    /// dQ, `[tokens, heads, head_dim]`. Rows of a document are written, and nothing else.
    pub dq: DeviceTensor,
    /// Address of the `documents + 1` boundaries, `i32`, as `flamia_sched::Documents` has them.
    pub cu_seqlens: u64,
    /// As large as [`BackwardFusedConfig::scratch`] says.
    pub scratch: Scratch,
}

/// The kernels on one GPU. Clones are the same kernels.
#[derive(Clone)]
pub struct BackwardFused {
    prepare: Kernel,
    kernel: Kernel,
    finish: Kernel,
    config: BackwardFusedConfig,
    ctas: u32,
    starts_early: bool,
}

impl BackwardFused {
    /// Compiles and loads them, or finds them compiled.
    ///
    /// # Errors
    /// The GPU is no Hopper, there is no compiler, or the GPU does not load the code.
    pub fn new(gpu: &Gpu, config: BackwardFusedConfig) -> Result<Self, BackwardFusedError> {
        require_hopper(gpu)?;
        let kernel = gpu
            .compile(&SOURCE, &config.defines())?
            .kernel("attention_backward_fused")?;
        kernel.set_shared_limit(config.shared_bytes())?;
        let sums = gpu.compile(&SUMS_SOURCE, &config.sums_defines())?;
        Ok(Self {
            prepare: sums.kernel("prepare_dq_sums")?,
            kernel,
            finish: sums.kernel("finish_dq_sums")?,
            config,
            ctas: gpu.multiprocessors(),
            starts_early: true,
        })
    }

    /// The same kernels; whether the one of dK and dV begins before the one that prepares sums is over, as
    /// that of a new value does. It never reads what that has not written yet.
    #[must_use]
    pub fn starting_early(self, starts_early: bool) -> Self {
        Self {
            starts_early,
            ..self
        }
    }

    /// What they were compiled for.
    pub const fn config(&self) -> &BackwardFusedConfig {
        &self.config
    }

    /// Computes dQ, dK and dV. Waits for nothing, and can be captured: the launches depend on shapes
    /// alone.
    ///
    /// # Errors
    /// Something does not fit, or the driver refuses a launch.
    ///
    /// # Safety
    /// - The stream is one of the kernels' GPU, and this value, or a clone, is kept until the work has
    ///   run (in a graph: until the last replay has).
    /// - Until then everything behind the addresses is valid memory of that GPU, and nothing else
    ///   writes what is read or touches the gradients, the scratch and the counter.
    /// - The operands were quantised for the same boundaries, and hold as many tokens and documents, and
    ///   the heads and head dimension that the call says.
    /// - The work is that of the same boundaries, cut by [`BackwardFusedConfig::tiling`].
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        call: &BackwardFusedCall,
    ) -> Result<(), BackwardFusedError> {
        let BackwardKeysCall {
            heads,
            dk,
            documents,
            ..
        } = call.keys;
        let [tokens, kv_heads, _] = dk.shape;
        let scratch = self.config.scratch(tokens, documents, heads, kv_heads)?;
        let (parameters, around) = self.config.parameters(call, &scratch)?;
        if tokens == 0 || heads == 0 || documents == 0 {
            return Ok(());
        }
        let padded = &scratch.padded;
        let pairs = (kv_heads * documents) as u64;
        let chunks = (padded.image_bytes() / CODES_PER_CHUNK) as u64;
        let prepare = pairs.div_ceil(PREPARE_PAIRS)
            + chunks.div_ceil(u64::from(PREPARE_THREADS) * PREPARE_CHUNKS);
        // The layout has seen that all blocks of all heads fit a grid.
        let number = |n: u64| u32::try_from(n).unwrap_or(i32::MAX.unsigned_abs());
        let early = |launch| Launch {
            starts_early: self.starts_early,
            ..launch
        };
        let prepare = early(Launch::linear(number(prepare), PREPARE_THREADS));
        let main =
            early(Launch::linear(self.ctas, THREADS).with_shared(self.config.shared_bytes()));
        let finish = (padded.heads() * padded.blocks()) as u64;
        let finish = early(Launch::linear(number(finish), FINISH_THREADS));
        // SAFETY: kernels that start early wait for what is in front of them before they read or write anything of
        // it. The parameters are the kernels', which the compiler compared field by field; every address in
        // them is the caller's, who vouches for the memory behind it, and the scratch was checked to
        // hold the sums.
        unsafe {
            self.prepare.launch(stream, prepare, (around,))?;
            self.kernel.launch(stream, main, (parameters,))?;
            self.finish.launch(stream, finish, (around,))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flamia_sched::Mask;

    use super::super::backward_keys::tests::call as keys_call;
    use super::*;
    use crate::cuda::layout::HeadDim;

    const CONFIG: BackwardFusedConfig = BackwardFusedConfig {
        keys: BackwardKeysConfig {
            head_dim: HeadDim::D128,
            mask: Mask::Causal,
            rotated: true,
        },
        sums: DqSums::Fp16,
    };

    fn scratch() -> FusedScratch {
        CONFIG.scratch(100, 3, 8, 4).unwrap()
    }

    /// A call with addresses of nothing.
    fn call() -> BackwardFusedCall {
        BackwardFusedCall {
            keys: keys_call(),
            dq: DeviceTensor::packed("dq", 50 << 20, [100, 8, 128]),
            cu_seqlens: 51 << 20,
            scratch: Scratch {
                address: 52 << 20,
                bytes: scratch().bytes(),
            },
        }
    }

    #[test]
    fn parameters_are_the_call_s() {
        let (kernel, around) = CONFIG.parameters(&call(), &scratch()).unwrap();
        assert_eq!(kernel.k, 20 << 20);
        assert_eq!(
            [around.d_o_folds, around.k_folds, around.v_folds],
            [43 << 20, 23 << 20, 33 << 20]
        );
        assert_eq!([kernel.dq, around.sums], [52 << 20; 2]);
        let of_q = 8 * kernel.slots as u64 * 128 * 2;
        assert_eq!([kernel.q_values, around.q_values], [(52 << 20) + of_q; 2]);
        assert_eq!(
            [kernel.key_exponents, around.key_exponents],
            [(52 << 20) + 2 * of_q; 2]
        );
        assert_eq!([around.token_stride, around.head_stride], [1024, 128]);
        assert_eq!((around.heads, around.kv_heads, around.documents), (8, 4, 3));
        assert_eq!(around.scale, kernel.dk_scale);
        assert_eq!(scratch().bytes() as u64, 2 * of_q + 3 * 4 * 4);
    }

    #[test]
    fn what_the_kernel_cannot_compute_is_refused() {
        let refused = |change: &dyn Fn(&mut BackwardFusedCall)| {
            let mut call = call();
            change(&mut call);
            CONFIG
                .parameters(&call, &scratch())
                .unwrap_err()
                .to_string()
        };
        for (told, part) in [
            (refused(&|call| call.dq.shape[1] = 4), "[100, 4, 128]"),
            (refused(&|call| call.scratch.bytes -= 1), "bytes of scratch"),
            (refused(&|call| call.keys.heads = 6), "6 query heads"),
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[test]
    fn shared_memory_suffices_for_every_variant() {
        for head_dim in [HeadDim::D64, HeadDim::D128] {
            for sums in DqSums::ALL {
                let keys = BackwardKeysConfig {
                    head_dim,
                    ..CONFIG.keys
                };
                let bytes = BackwardFusedConfig { keys, sums }.shared_bytes();
                assert!(bytes <= 232_448, "{head_dim:?} {sums:?}: {bytes}");
            }
        }
    }
}
