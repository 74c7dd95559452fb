//! This project's kernels.

use flamia_autograd::TorchMemory;
use flamia_cuda::Stream;
use flamia_kernels::cuda::call::{CallShape, CallTensors, Codes, ForwardPlan};
use flamia_kernels::cuda::tensor::Scratch;
use flamia_kernels::{Mask, Options, Path, Profile};
use tch::{Kind, Tensor};

use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::operands::{Device, Operands, address, packed};
use crate::attention::row::{Masking, Memory, Pass, Precision, Quantisation, System};

/// Its name in the table.
pub const NAME: &str = "flamia mxfp8";

/// What the results are filled with before the first call writes them.
const POISON: f64 = f64::NAN;

/// The options that are timed, and compared with the CPU.
pub fn options(mask: Masking) -> Options {
    let mut options = Options::new(Path::Mxfp8, Mask::from(mask));
    options.profile = Profile::Hopper;
    options
}

/// The forward pass with its workspace and results, all of torch's allocator.
pub struct Flamia<'a> {
    operands: &'a Operands,
    plan: ForwardPlan,
    schedule: Tensor,
    scratch: Tensor,
    codes: Codes,
    /// `[rows, heads, head_dim]`.
    pub o: Tensor,
    /// `[heads, rows]`.
    pub lse: Tensor,
    memory: Memory,
}

impl<'a> Flamia<'a> {
    /// Allocates a call, builds its schedule and runs it once.
    pub fn new(
        device: &Device,
        operands: &'a Operands,
        mask: Masking,
        stream: Stream<'_>,
    ) -> Result<Self, GpuBenchError> {
        let (shape, documents) = (operands.shape, &operands.documents);
        let shape = CallShape::of(documents, shape.heads, shape.kv_heads, shape.head_dim);
        let plan = device.kernels.plan(shape, &options(mask))?;
        let layouts = [plan.schedule_layout().bytes, plan.scratch_bytes()];

        let before = TorchMemory::reset(device.ordinal)?.now;
        let bytes = |count: usize| Tensor::f_empty([count as i64], (Kind::Uint8, device.torch));
        let [schedule, scratch] = layouts.map(bytes);
        let (schedule, scratch) = (schedule?, scratch?);
        let o = operands.q.f_full_like(POISON)?;
        let lse = [shape.heads, shape.tokens].map(|n| n as i64);
        let lse = Tensor::f_full(lse, POISON, (Kind::Float, device.torch))?;
        let tensors = tensors(operands, &o, &lse)?;
        // SAFETY: the memory is this GPU's, as large as the plan says, and kept with the plan; all work
        // is given to one stream, and the boundaries are those of packed documents.
        let codes = unsafe {
            let (boundaries, schedule) = (tensors.cu_seqlens, address(&schedule));
            device
                .kernels
                .build_schedule(stream, &plan, boundaries, schedule)?;
            let codes = plan.quantise(stream, &tensors, place(&scratch))?;
            plan.attend(stream, &tensors, &codes, schedule)?;
            codes
        };

        let peak = TorchMemory::of(device.ordinal)?.peak;
        let results = [&o, &lse].map(|x| x.numel() * x.kind().elt_size_in_bytes());
        let [results, layouts] = [results, layouts].map(|of| of.iter().sum::<usize>() as u64);
        Ok(Self {
            operands,
            plan,
            schedule,
            scratch,
            codes,
            o,
            lse,
            memory: Memory {
                peak: (peak - before).saturating_sub(results),
                layouts: Some(layouts),
            },
        })
    }
}

fn tensors(operands: &Operands, o: &Tensor, lse: &Tensor) -> Result<CallTensors, GpuBenchError> {
    Ok(CallTensors {
        q: packed("q", &operands.q)?,
        k: packed("k", &operands.k)?,
        v: packed("v", &operands.v)?,
        o: packed("o", o)?,
        lse: address(lse),
        cu_seqlens: address(&operands.cu_seqlens),
    })
}

fn place(scratch: &Tensor) -> Scratch {
    Scratch {
        address: address(scratch),
        bytes: scratch.numel(),
    }
}

impl Contestant for Flamia<'_> {
    fn system(&self) -> System {
        System {
            name: NAME.to_owned(),
            precision: Precision::Mxfp8,
            is_ours: true,
        }
    }

    fn calls(&self) -> Vec<Call> {
        let forward = |quantisation| Call {
            pass: Pass::Fwd,
            quantisation: Some(quantisation),
        };
        [Quantisation::Out, Quantisation::In].map(forward).to_vec()
    }

    fn launch(&self, call: Call, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        let (plan, schedule) = (&self.plan, address(&self.schedule));
        let tensors = tensors(self.operands, &self.o, &self.lse)?;
        // SAFETY: as in `new`, where the operands were quantised.
        unsafe {
            match call.quantisation {
                Some(Quantisation::In) => {
                    plan.launch(stream, &tensors, schedule, place(&self.scratch))?;
                }
                _ => plan.attend(stream, &tensors, &self.codes, schedule)?,
            }
        }
        Ok(())
    }

    fn memory(&self, call: Call) -> Option<Memory> {
        (call.quantisation == Some(Quantisation::In)).then_some(self.memory)
    }

    fn note(&self) -> &'static str {
        ""
    }
}
