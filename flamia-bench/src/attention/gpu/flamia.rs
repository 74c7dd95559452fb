//! This project's kernels.

use flamia_autograd::TorchMemory;
use flamia_cuda::Stream;
use flamia_kernels::cuda::call::{
    BackwardCodes, BackwardTensors, CallShape, CallTensors, Codes, SavedImages, TrainingPlan,
};
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

/// Both passes with their workspace and results, all of torch's allocator.
pub struct Flamia<'a> {
    operands: &'a Operands,
    images: SavedImages,
    plan: TrainingPlan,
    schedule: Tensor,
    /// Codes and scales of Q, K and V.
    saved: Tensor,
    scratch: Tensor,
    codes: Codes,
    backward_codes: BackwardCodes,
    /// `[rows, heads, head_dim]`.
    pub o: Tensor,
    /// `[heads, rows]`.
    pub lse: Tensor,
    /// Of Q, K and V.
    pub gradients: [Tensor; 3],
    memory: [Memory; 2],
}

impl<'a> Flamia<'a> {
    /// Allocates a call, builds its schedule and runs it once.
    pub fn new(
        device: &Device,
        operands: &'a Operands,
        mask: Masking,
        images: SavedImages,
        stream: Stream<'_>,
    ) -> Result<Self, GpuBenchError> {
        let (shape, documents) = (operands.shape, &operands.documents);
        let shape = CallShape::of(documents, shape.heads, shape.kv_heads, shape.head_dim);
        let plan = device
            .kernels
            .training_plan(shape, &options(mask), images)?;
        let schedule = plan.forward().schedule_layout().bytes;
        let layouts = [schedule + plan.saved_bytes(), plan.scratch_bytes()];

        let peak = || Ok::<_, GpuBenchError>(TorchMemory::of(device.ordinal)?.peak);
        let before = TorchMemory::reset(device.ordinal)?.now;
        let bytes = |count: usize| Tensor::f_empty([count as i64], (Kind::Uint8, device.torch));
        let (schedule, saved) = (bytes(schedule)?, bytes(plan.saved_bytes())?);
        let o = operands.q.f_full_like(POISON)?;
        let lse = [shape.heads, shape.tokens].map(|n| n as i64);
        let lse = Tensor::f_full(lse, POISON, (Kind::Float, device.torch))?;
        let forward = tensors(operands, &o, &lse)?;
        // SAFETY: the memory is this GPU's, as large as the plan says, and kept with the plan; all work
        // is given to one stream, and the boundaries are those of packed documents.
        let codes = unsafe {
            let (boundaries, schedule) = (forward.cu_seqlens, address(&schedule));
            device
                .kernels
                .build_schedule(stream, plan.forward(), boundaries, schedule)?;
            let codes = plan.forward().quantise(stream, &forward, place(&saved))?;
            plan.forward().attend(stream, &forward, &codes, schedule)?;
            codes
        };
        let forward_peak = peak()? - before;

        let before = TorchMemory::reset(device.ordinal)?.now;
        let scratch = bytes(plan.scratch_bytes())?;
        let poisoned = |x: &Tensor| x.f_full_like(POISON);
        let gradients = [
            poisoned(&operands.q)?,
            poisoned(&operands.k)?,
            poisoned(&operands.v)?,
        ];
        let backward = backward_tensors(operands, &o, &lse, &gradients)?;
        // SAFETY: as above.
        let backward_codes = unsafe {
            let codes = plan.prepare(stream, &backward, place(&saved), place(&scratch))?;
            plan.gradients(stream, &backward, &codes, address(&schedule))?;
            codes
        };
        let backward_peak = peak()? - before;

        let size = |x: &Tensor| (x.numel() * x.kind().elt_size_in_bytes()) as u64;
        let outputs = size(&o) + size(&lse);
        let memory = [
            (forward_peak, outputs),
            (backward_peak, gradients.iter().map(size).sum()),
        ];
        let [forward, backward] = layouts.map(|bytes| bytes as u64);
        let memory = [(memory[0], forward), (memory[1], backward)];
        Ok(Self {
            operands,
            images,
            plan,
            schedule,
            saved,
            scratch,
            codes,
            backward_codes,
            o,
            lse,
            gradients,
            memory: memory.map(|((peak, results), layouts)| Memory {
                peak: peak.saturating_sub(results),
                layouts: Some(layouts),
            }),
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

fn backward_tensors(
    operands: &Operands,
    o: &Tensor,
    lse: &Tensor,
    [dq, dk, dv]: &[Tensor; 3],
) -> Result<BackwardTensors, GpuBenchError> {
    Ok(BackwardTensors {
        o: packed("o", o)?,
        lse: address(lse),
        d_o: packed("dO", &operands.d_o)?,
        dq: packed("dq", dq)?,
        dk: packed("dk", dk)?,
        dv: packed("dv", dv)?,
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
            name: match self.images {
                SavedImages::One => NAME.to_owned(),
                SavedImages::Both => format!("{NAME}, both images saved"),
            },
            precision: Precision::Mxfp8,
            is_ours: true,
        }
    }

    fn calls(&self) -> Vec<Call> {
        use {Pass::*, Quantisation::*};
        let calls: &[(Pass, Quantisation)] = match self.images {
            SavedImages::One => &[(Fwd, Out), (Fwd, In), (Bwd, Out), (Bwd, In), (Train, In)],
            // What differs.
            SavedImages::Both => &[(Bwd, In), (Train, In)],
        };
        let call = |&(pass, quantisation)| Call {
            pass,
            quantisation: Some(quantisation),
        };
        calls.iter().map(call).collect()
    }

    fn launch(&self, call: Call, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        let (plan, schedule) = (&self.plan, address(&self.schedule));
        let (saved, scratch) = (place(&self.saved), place(&self.scratch));
        let forward = tensors(self.operands, &self.o, &self.lse)?;
        let backward = backward_tensors(self.operands, &self.o, &self.lse, &self.gradients)?;
        let is_in = call.quantisation == Some(Quantisation::In);
        // SAFETY: as in `new`, where the operands were quantised.
        unsafe {
            match (call.pass, is_in) {
                (Pass::Fwd, true) => plan.forward().launch(stream, &forward, schedule, saved)?,
                (Pass::Fwd, false) => {
                    plan.forward()
                        .attend(stream, &forward, &self.codes, schedule)?;
                }
                (Pass::Bwd, true) => plan.backward(stream, &backward, schedule, saved, scratch)?,
                (Pass::Bwd, false) => {
                    plan.gradients(stream, &backward, &self.backward_codes, schedule)?;
                }
                (Pass::Train, _) => {
                    plan.forward().launch(stream, &forward, schedule, saved)?;
                    plan.backward(stream, &backward, schedule, saved, scratch)?;
                }
            }
        }
        Ok(())
    }

    fn memory(&self, call: Call) -> Option<Memory> {
        let [forward, backward] = self.memory;
        match (call.pass, call.quantisation) {
            (Pass::Fwd, Some(Quantisation::In)) => Some(forward),
            (Pass::Bwd, Some(Quantisation::In)) => Some(backward),
            _ => None,
        }
    }

    fn note(&self) -> &'static str {
        ""
    }
}
