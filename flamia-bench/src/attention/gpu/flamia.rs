//! This project's kernels.

use flamia_autograd::TorchMemory;
use flamia_cuda::Stream;
use flamia_kernels::cuda::call::{
    BackwardCodes, BackwardTensors, CallTensors, Codes, FormChoice, ForwardPlan, SavedImages,
    TrainingPlan,
};
use flamia_kernels::cuda::tensor::Scratch;
use flamia_sched::Documents;
use flamia_sched::cuda::ScheduleHeader;
use tch::{Kind, Tensor};

use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::operands::{Device, Operands, address, packed};
use crate::attention::row::{Masking, Memory, Pass, Precision, Quantisation, System};
use crate::attention::way::{Schedule, Way};

/// Its name in the table.
pub const NAME: &str = "flamia mxfp8";

/// What the results are filled with before the first call writes them.
const POISON: f64 = f64::NAN;

/// Both passes with their workspace and results, all of torch's allocator.
pub struct Flamia<'a> {
    name: String,
    operands: &'a Operands,
    way: Way,
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
        (name, way): (String, Way),
        stream: Stream<'_>,
    ) -> Result<Self, GpuBenchError> {
        let (shape, documents) = (operands.shape.of_call(), &operands.documents);
        let plan = device.kernels.tuned_training_plan(
            shape,
            &way.options(mask),
            way.images,
            way.tuning,
        )?;
        let schedule = plan.forward().schedule_layout().bytes;
        let layouts = [schedule + plan.saved_bytes(), plan.scratch_bytes()];

        let peak = || Ok::<_, GpuBenchError>(TorchMemory::of(device.ordinal)?.peak);
        let before = TorchMemory::reset(device.ordinal)?.now;
        let bytes = |count: usize| Tensor::f_empty([count as i64], (Kind::Uint8, device.torch));
        let (schedule, saved) = (bytes(schedule)?, bytes(plan.saved_bytes())?);
        let o = operands.q.f_full_like(POISON)?;
        let lse = [shape.heads, shape.tokens].map(|n| n as i64);
        let lse = Tensor::f_full(lse, POISON, (Kind::Float, device.torch))?;
        let Operands {
            q,
            k,
            v,
            d_o,
            cu_seqlens,
            ..
        } = operands;
        let forward = tensors([q, k, v, &o], &lse, cu_seqlens)?;
        // SAFETY: the memory is this GPU's, as large as the plan says, and kept with the plan; all work
        // is given to one stream, and the boundaries are those of packed documents.
        let codes = unsafe {
            let (boundaries, at) = (forward.cu_seqlens, address(&schedule));
            device
                .kernels
                .build_schedule(stream, plan.forward(), boundaries, at)?;
            arrange(&schedule, plan.forward(), documents, way.schedule)?;
            let codes = plan.forward().quantise(stream, &forward, place(&saved))?;
            plan.forward().attend(stream, &forward, &codes, at)?;
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
        let backward = backward_tensors([&o, &lse, d_o], &gradients, cu_seqlens)?;
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
            name,
            operands,
            way,
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

impl Flamia<'_> {
    /// Whether both backward passes are of the same form.
    pub fn is_of_form(&self, other: &Flamia<'_>) -> bool {
        self.plan.form().form == other.plan.form().form
    }
}

/// Gives a schedule that was built for these documents another order, or another acquisition.
fn arrange(
    schedule: &Tensor,
    plan: &ForwardPlan,
    documents: &Documents,
    way: Schedule,
) -> Result<(), GpuBenchError> {
    let layout = plan.schedule_layout();
    let put = |offset: usize, bytes: &[u8]| -> Result<(), GpuBenchError> {
        let mut there = schedule.f_narrow(0, offset as i64, bytes.len() as i64)?;
        there.f_copy_(&Tensor::f_from_slice(bytes)?)?;
        Ok(())
    };
    match way {
        Schedule::Built => Ok(()),
        Schedule::Static => {
            let flag = layout.header + ScheduleHeader::acquisition_offset();
            put(flag, &0u32.to_ne_bytes())
        }
        Schedule::InOrder => {
            let lists = [layout.forward, layout.backward];
            for (tiling, list) in plan.tilings().iter().zip(lists) {
                let items = tiling.items(documents);
                let words =
                    items.flat_map(|item| [item.document, item.first, item.start, item.len]);
                put(list, &words.flat_map(i32::to_ne_bytes).collect::<Vec<_>>())?;
            }
            Ok(())
        }
    }
}

pub(super) fn tensors(
    [q, k, v, o]: [&Tensor; 4],
    lse: &Tensor,
    cu_seqlens: &Tensor,
) -> Result<CallTensors, GpuBenchError> {
    Ok(CallTensors {
        q: packed("q", q)?,
        k: packed("k", k)?,
        v: packed("v", v)?,
        o: packed("o", o)?,
        lse: address(lse),
        cu_seqlens: address(cu_seqlens),
    })
}

pub(super) fn backward_tensors(
    [o, lse, d_o]: [&Tensor; 3],
    [dq, dk, dv]: &[Tensor; 3],
    cu_seqlens: &Tensor,
) -> Result<BackwardTensors, GpuBenchError> {
    Ok(BackwardTensors {
        o: packed("o", o)?,
        lse: address(lse),
        d_o: packed("dO", d_o)?,
        dq: packed("dq", dq)?,
        dk: packed("dk", dk)?,
        dv: packed("dv", dv)?,
        cu_seqlens: address(cu_seqlens),
    })
}

pub(super) fn place(scratch: &Tensor) -> Scratch {
    Scratch {
        address: address(scratch),
        bytes: scratch.numel(),
    }
}

impl Contestant for Flamia<'_> {
    fn system(&self) -> System {
        System {
            name: self.name.clone(),
            precision: Precision::Mxfp8,
            is_ours: true,
        }
    }

    fn calls(&self) -> Vec<Call> {
        use {Pass::*, Quantisation::*};
        let calls: &[(Pass, Quantisation)] = match self.way.images {
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
        let Operands {
            q,
            k,
            v,
            d_o,
            cu_seqlens,
            ..
        } = self.operands;
        let forward = tensors([q, k, v, &self.o], &self.lse, cu_seqlens)?;
        let backward = backward_tensors([&self.o, &self.lse, d_o], &self.gradients, cu_seqlens)?;
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

    fn form(&self, call: Call) -> Option<FormChoice> {
        (call.pass != Pass::Fwd).then(|| self.plan.form())
    }
}
