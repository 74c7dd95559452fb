//! This project's kernels.

use std::num::NonZero;

use flamia_autograd::TorchMemory;
use flamia_cuda::Stream;
use flamia_kernels::Mask;
use flamia_kernels::cuda::forward::{Forward, ForwardCall, ForwardConfig, ForwardWork, ItemRows};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{
    Forms, Quantisation, QuantiseCall, Quantised, QuantisedLayout, Quantiser,
};
use flamia_kernels::cuda::tensor::Scratch;
use flamia_kernels::{Options, Path};
use flamia_sched::cuda::{
    Boundary, BuildCall, ScheduleError, ScheduleHeader, ScheduleKernels, ScheduleLayout,
};
use flamia_sched::work::{self, HeadSections};
use tch::{Kind, Tensor};

use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::operands::{Device, Operands, address, bytes, packed};
use crate::attention::row::{self, Masking, Memory, Pass, Precision, System};
use crate::attention::workload::Shape;

/// Its name in the table.
pub const NAME: &str = "flamia mxfp8";

/// What the results are filled with before the first call writes them.
const POISON: f64 = f64::NAN;

/// The forward pass with its operands, workspace and results, all of torch's allocator.
pub struct Flamia<'a> {
    operands: &'a Operands,
    quantisers: [Quantiser; 3],
    scratch: [Tensor; 3],
    quantised: [Quantised; 3],
    forward: Forward,
    schedule: Tensor,
    schedule_layout: ScheduleLayout,
    sections: HeadSections,
    /// `[rows, heads, head_dim]`.
    pub o: Tensor,
    /// `[heads, rows]`.
    pub lse: Tensor,
    c: i32,
    tau: f32,
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
        let Operands {
            shape,
            ref documents,
            head_dim,
            ..
        } = *operands;
        let mask = Mask::from(mask);
        let config = ForwardConfig {
            head_dim,
            mask,
            item_rows: ItemRows::R192,
        };
        let forward = Forward::new(&device.gpu, config)?;
        let planned = quantisations(head_dim);
        let [q, k, v] = planned.map(|quantisation| Quantiser::new(&device.gpu, quantisation));
        let quantisers = [q?, k?, v?];
        let builder = ScheduleKernels::new(&device.gpu, Boundary::Int32)?;

        // What a call occupies from here on is what it costs.
        let before = TorchMemory::reset(device.ordinal)?.now;
        let layout = |index: usize| -> Result<QuantisedLayout, GpuBenchError> {
            let heads = [shape.heads, shape.kv_heads, shape.kv_heads][index];
            Ok(planned[index].layout(documents.total(), documents.len(), heads)?)
        };
        let layouts = [layout(0)?, layout(1)?, layout(2)?];
        let schedule_layout =
            ScheduleLayout::new(documents.total()).map_err(ScheduleError::from)?;
        let [q, k, v] = layouts.map(|layout| bytes(device, layout.bytes()));
        let scratch = [q?, k?, v?];
        let place = |index: usize| layouts[index].at(address(&scratch[index]));
        let quantised = [place(0), place(1), place(2)];
        let schedule = bytes(device, schedule_layout.bytes)?;
        let o = operands.q.f_full_like(POISON)?;
        let lse = [shape.heads, documents.total()].map(|n| n as i64);
        let lse = Tensor::f_full(lse, POISON, (Kind::Float, device.torch))?;
        let results = o.numel() * o.kind().elt_size_in_bytes() + lse.numel() * size_of::<f32>();
        let options = Options::new(Path::Mxfp8, mask);
        let mut flamia = Self {
            operands,
            quantisers,
            quantised,
            scratch,
            forward,
            schedule,
            schedule_layout,
            sections: sections(device, operands),
            o,
            lse,
            c: options.c,
            tau: options.tau,
            memory: Memory {
                peak: 0,
                layouts: Some(
                    (layouts.iter().map(QuantisedLayout::bytes).sum::<usize>()
                        + schedule_layout.bytes) as u64,
                ),
            },
        };

        let call = BuildCall {
            item_rows: [
                config.item_rows.get(),
                BuildCall::new(0, 0, mask).item_rows[1],
            ],
            ..BuildCall::new(address(&operands.cu_seqlens), documents.len() + 1, mask)
        };
        // SAFETY: the boundaries are those of packed documents, and all memory is of this layout, on
        // this GPU and kept.
        unsafe { builder.build(stream, &schedule_layout, address(&flamia.schedule), &call)? };
        flamia.quantise(stream)?;
        flamia.attend(stream)?;
        // The schedule's kernels have to stay loaded until they ran.
        device.gpu.synchronize()?;
        let peak = TorchMemory::of(device.ordinal)?.peak;
        flamia.memory.peak = (peak - before).saturating_sub(results as u64);
        Ok(flamia)
    }

    fn quantise(&self, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        let Operands {
            q,
            k,
            v,
            cu_seqlens,
            documents,
            ..
        } = self.operands;
        let inputs = [packed("q", q)?, packed("k", k)?, packed("v", v)?];
        for ((quantiser, scratch), input) in self.quantisers.iter().zip(&self.scratch).zip(inputs) {
            let call = QuantiseCall {
                input,
                output: None,
                cu_seqlens: address(cu_seqlens),
                documents: documents.len(),
            };
            let place = Scratch {
                address: address(scratch),
                bytes: scratch.numel(),
            };
            // SAFETY: the tensors are of this GPU and kept with the quantiser, the boundaries are those
            // of packed documents, and all calls are given to one stream.
            unsafe { quantiser.launch(stream, &call, place)? };
        }
        Ok(())
    }

    fn attend(&self, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        let [q, k, v] = self.quantised;
        let schedule = address(&self.schedule);
        let counter =
            self.schedule_layout.header + ScheduleHeader::counter_offset(work::Pass::Forward);
        let call = ForwardCall {
            q,
            k,
            v,
            kv_heads: self.operands.shape.kv_heads,
            o: packed("o", &self.o)?,
            lse: address(&self.lse),
            documents: self.operands.documents.len(),
            work: ForwardWork::of(&self.schedule_layout, schedule),
            sections: self.sections,
            counter: schedule + counter as u64,
            scale: self.operands.scale(),
            c: self.c,
            tau: self.tau,
        };
        // SAFETY: as in `quantise`; the operands lie where it put them, and the schedule is that of the
        // same documents, cut for this kernel.
        unsafe { self.forward.launch(stream, &call)? };
        Ok(())
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
        vec![
            forward(row::Quantisation::Out),
            forward(row::Quantisation::In),
        ]
    }

    fn launch(&self, call: Call, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        if call.quantisation == Some(row::Quantisation::In) {
            self.quantise(stream)?;
        }
        self.attend(stream)
    }

    fn memory(&self, call: Call) -> Option<Memory> {
        (call.quantisation == Some(row::Quantisation::In)).then_some(self.memory)
    }

    fn note(&self) -> &'static str {
        ""
    }
}

/// Of Q, K and V, what the forward pass reads.
fn quantisations(head_dim: HeadDim) -> [Quantisation; 3] {
    // As `Hadamard::Auto` has it.
    let is_rotated = head_dim == HeadDim::D128;
    let of = |hadamard, forms| Quantisation {
        head_dim,
        hadamard,
        forms,
    };
    [
        of(is_rotated, Forms::Row),
        of(is_rotated, Forms::Row),
        of(false, Forms::Transposed),
    ]
}

/// Sections whose keys and values, codes of one byte, fit half of the L2 cache.
fn sections(device: &Device, operands: &Operands) -> HeadSections {
    let Shape {
        heads,
        kv_heads,
        head_dim,
        ..
    } = operands.shape;
    let number = |n: usize| NonZero::new(n).unwrap_or(NonZero::<usize>::MIN);
    HeadSections::fitting(
        number(heads),
        number(heads / kv_heads),
        operands.documents.total(),
        2 * head_dim,
        device.gpu.l2_bytes() / 2,
    )
}
