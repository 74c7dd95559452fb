//! The forward pass on a Hopper GPU as a scheme of `probe leakage`.

use flamia_cuda::{Arch, Buffer, Gpu, GpuError};
use flamia_kernels::cuda::call::{CallError, CallShape, CallTensors, Kernels};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_kernels::{Mask, Options, Path, Profile};
use half::bf16;

use crate::error::ProbeError;
use crate::leakage::Scheme;
use crate::problem::{Outputs, Problem};

/// `mxfp8-hopper-gpu` under `mask`, with O and LSE; none without a Hopper GPU.
pub fn schemes(mask: Mask) -> Vec<Scheme> {
    let Ok(gpu) = Gpu::new(0) else {
        return Vec::new();
    };
    if gpu.arch() != Arch::Sm90a {
        return Vec::new();
    }
    let kernels = Kernels::new(gpu);
    vec![Scheme::new("mxfp8-hopper-gpu", move |problem| {
        attend(&kernels, problem, mask).map_err(|error| ProbeError::Foreign(error.into()))
    })]
}

/// Why the GPU gave no result.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// O and LSE of a packed row. Values that BF16 does not hold are rounded.
fn attend(kernels: &Kernels, problem: &Problem, mask: Mask) -> Result<Outputs, Failure> {
    let Problem {
        ref documents,
        heads,
        kv_heads,
        head_dim,
        ..
    } = *problem;
    let gpu = kernels.gpu();
    let shape = CallShape::of(documents, heads, kv_heads, head_dim);
    let options = Options {
        profile: Profile::Hopper,
        ..Options::new(Path::Mxfp8, mask)
    };
    let plan = kernels.plan(shape, &options)?;
    let upload = |values: &[f32]| {
        let bits: Vec<_> = values
            .iter()
            .map(|x| bf16::from_f32(*x).to_bits())
            .collect();
        Buffer::from_slice(gpu, &bits)
    };
    let (q, k, v) = (
        upload(&problem.q)?,
        upload(&problem.k)?,
        upload(&problem.v)?,
    );
    let rows = documents.total() * heads;
    let o = Buffer::<u16>::filled(gpu, rows * head_dim, 0)?;
    let lse = Buffer::<f32>::filled(gpu, rows, 0)?;
    let cu_seqlens = Buffer::from_slice(gpu, documents.cu_seqlens())?;
    let schedule = Buffer::<u8>::filled(gpu, plan.schedule_layout().bytes, 0)?;
    let scratch = Buffer::<u8>::filled(gpu, plan.scratch_bytes(), 0)?;

    let tensor = |name, buffer: &Buffer<u16>, heads| {
        DeviceTensor::packed(name, buffer.pointer(), [documents.total(), heads, head_dim])
    };
    let tensors = CallTensors {
        q: tensor("q", &q, heads),
        k: tensor("k", &k, kv_heads),
        v: tensor("v", &v, kv_heads),
        o: tensor("o", &o, heads),
        lse: lse.pointer(),
        cu_seqlens: cu_seqlens.pointer(),
    };
    let memory = Scratch {
        address: scratch.pointer(),
        bytes: scratch.len(),
    };
    let stream = gpu.context().default_stream();
    let stream = (&*stream).into();
    // SAFETY: the buffers have the plan's sizes and hold what the tensors say; they and the plan outlive
    // the downloads, which wait for the work.
    unsafe {
        kernels.build_schedule(stream, &plan, cu_seqlens.pointer(), schedule.pointer())?;
        plan.launch(stream, &tensors, schedule.pointer(), memory)?;
    }
    let o = o.download()?;
    Ok(Outputs {
        o: o.into_iter().map(|x| bf16::from_bits(x).to_f64()).collect(),
        lse: lse.download()?.into_iter().map(f64::from).collect(),
        dq: Vec::new(),
        dk: Vec::new(),
        dv: Vec::new(),
    })
}
