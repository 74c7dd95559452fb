//! This project's kernels.

use std::num::NonZero;

use flamia_autograd::TorchMemory;
use flamia_cuda::Stream;
use flamia_kernels::cuda::forward::{Forward, ForwardCall, ForwardConfig, ForwardWork, ItemRows};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{
    Forms, Quantisation, QuantiseCall, Quantised, QuantisedLayout, Quantiser,
};
use flamia_kernels::cuda::tensor::Scratch;
use flamia_kernels::{Mask, Options, Path};
use flamia_sched::cuda::{
    Boundary, BuildCall, ScheduleError, ScheduleHeader, ScheduleKernels, ScheduleLayout,
};
use flamia_sched::work::{self, HeadSections};
use tch::{Kind, Tensor};

use super::contestant::{Call, Contestant};
use super::error::GpuBenchError;
use super::operands::{Device, Operands, address, bytes, packed};
use crate::attention::row::{self, Masking, Memory, Pass, Precision, System};

/// Its name in the table.
pub const NAME: &str = "flamia mxfp8";

/// What the results are filled with before the first call writes them.
const POISON: f64 = f64::NAN;

/// The forward pass with its workspace and results, all of torch's allocator.
pub struct Flamia<'a> {
    operands: &'a Operands,
    q: Coded<'a>,
    k: Coded<'a>,
    v: Coded<'a>,
    schedule: Schedule,
    forward: Forward,
    sections: HeadSections,
    options: Options,
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
        let Operands {
            ref q,
            ref k,
            ref v,
            ref documents,
            shape,
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
        let before = TorchMemory::reset(device.ordinal)?.now;
        // As `Hadamard::Auto` has it.
        let is_rotated = head_dim == HeadDim::D128;
        let coded = |name, input, hadamard, forms| {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            Coded::new(device, operands, quantisation, name, input)
        };
        let lse = [shape.heads, documents.total()].map(|n| n as i64);
        let mut flamia = Self {
            operands,
            q: coded("q", q, is_rotated, Forms::Row)?,
            k: coded("k", k, is_rotated, Forms::Row)?,
            v: coded("v", v, false, Forms::Transposed)?,
            schedule: Schedule::build(device, operands, &config, stream)?,
            forward,
            sections: sections(device, operands),
            options: Options::new(Path::Mxfp8, mask),
            o: q.f_full_like(POISON)?,
            lse: Tensor::f_full(lse, POISON, (Kind::Float, device.torch))?,
            memory: Memory {
                peak: 0,
                layouts: None,
            },
        };
        flamia.quantise(stream)?;
        flamia.attend(stream)?;

        let peak = TorchMemory::of(device.ordinal)?.peak;
        let results = [&flamia.o, &flamia.lse].map(|x| x.numel() * x.kind().elt_size_in_bytes());
        let layouts = [&flamia.q, &flamia.k, &flamia.v].map(|coded| coded.layout.bytes());
        let layouts = layouts.iter().sum::<usize>() + flamia.schedule.layout.bytes;
        flamia.memory = Memory {
            peak: (peak - before).saturating_sub(results.iter().sum::<usize>() as u64),
            layouts: Some(layouts as u64),
        };
        Ok(flamia)
    }

    fn quantise(&self, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        for coded in [&self.q, &self.k, &self.v] {
            coded.launch(self.operands, stream)?;
        }
        Ok(())
    }

    fn attend(&self, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        let call = ForwardCall {
            q: self.q.codes(),
            k: self.k.codes(),
            v: self.v.codes(),
            kv_heads: self.operands.shape.kv_heads,
            o: packed("o", &self.o)?,
            lse: address(&self.lse),
            documents: self.operands.documents.len(),
            work: self.schedule.work(),
            sections: self.sections,
            counter: self.schedule.counter(),
            scale: self.operands.scale(),
            c: self.options.c,
            tau: self.options.tau,
        };
        // SAFETY: all tensors are of this GPU, and kept with the kernel; the operands lie where
        // `quantise` put them on the same stream, and the schedule is that of the same documents, cut
        // for this kernel.
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
        [row::Quantisation::Out, row::Quantisation::In]
            .map(forward)
            .to_vec()
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

/// An operand with a place for its codes.
struct Coded<'a> {
    name: &'static str,
    input: &'a Tensor,
    quantiser: Quantiser,
    layout: QuantisedLayout,
    scratch: Tensor,
}

impl<'a> Coded<'a> {
    fn new(
        device: &Device,
        operands: &Operands,
        quantisation: Quantisation,
        name: &'static str,
        input: &'a Tensor,
    ) -> Result<Self, GpuBenchError> {
        let [tokens, heads, _] = packed(name, input)?.shape;
        let layout = quantisation.layout(tokens, operands.documents.len(), heads)?;
        Ok(Self {
            name,
            input,
            quantiser: Quantiser::new(&device.gpu, quantisation)?,
            scratch: bytes(device, layout.bytes())?,
            layout,
        })
    }

    fn codes(&self) -> Quantised {
        self.layout.at(address(&self.scratch))
    }

    fn launch(&self, operands: &Operands, stream: Stream<'_>) -> Result<(), GpuBenchError> {
        let call = QuantiseCall {
            input: packed(self.name, self.input)?,
            output: None,
            cu_seqlens: address(&operands.cu_seqlens),
            documents: operands.documents.len(),
        };
        let place = Scratch {
            address: address(&self.scratch),
            bytes: self.scratch.numel(),
        };
        // SAFETY: the tensors are of this GPU and kept with the quantiser, the boundaries are those of
        // packed documents, and all work is given to one stream.
        unsafe { self.quantiser.launch(stream, &call, place)? };
        Ok(())
    }
}

/// The work of the packed row.
struct Schedule {
    buffer: Tensor,
    layout: ScheduleLayout,
}

impl Schedule {
    /// Builds it on the GPU, and waits for that.
    fn build(
        device: &Device,
        operands: &Operands,
        config: &ForwardConfig,
        stream: Stream<'_>,
    ) -> Result<Self, GpuBenchError> {
        let Operands {
            cu_seqlens,
            documents,
            ..
        } = operands;
        let kernels = ScheduleKernels::new(&device.gpu, Boundary::Int32)?;
        let layout = ScheduleLayout::new(documents.total()).map_err(ScheduleError::from)?;
        let buffer = bytes(device, layout.bytes)?;
        let mut call = BuildCall::new(address(cu_seqlens), documents.len() + 1, config.mask);
        call.item_rows[0] = config.item_rows.get();
        // SAFETY: the boundaries are those of packed documents, the memory is of this layout and on
        // this GPU, and all of it is kept until the work is done.
        unsafe { kernels.build(stream, &layout, address(&buffer), &call)? };
        device.gpu.synchronize()?;
        Ok(Self { buffer, layout })
    }

    fn work(&self) -> ForwardWork {
        ForwardWork::of(&self.layout, address(&self.buffer))
    }

    fn counter(&self) -> u64 {
        let offset = ScheduleHeader::counter_offset(work::Pass::Forward);
        address(&self.buffer) + (self.layout.header + offset) as u64
    }
}

/// Sections whose keys and values, codes of one byte, fit half of the L2 cache.
fn sections(device: &Device, operands: &Operands) -> HeadSections {
    let shape = operands.shape;
    let number = |n: usize| NonZero::new(n).unwrap_or(NonZero::<usize>::MIN);
    HeadSections::fitting(
        number(shape.heads),
        number(shape.heads / shape.kv_heads),
        operands.documents.total(),
        2 * shape.head_dim,
        device.gpu.l2_bytes() / 2,
    )
}
