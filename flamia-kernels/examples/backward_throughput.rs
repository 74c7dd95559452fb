//! How fast the backward kernels are by themselves, operands quantised before: microseconds and TFLOP/s,
//! the median of replays of a graph. FLOPs are those of the products that each kernel makes, visible
//! pairs alone.
//!
//! `cargo run --release -p flamia-kernels --features cuda --example backward_throughput`

use std::error::Error;
use std::num::NonZero;

use flamia_cuda::{Buffer, Gpu, Graph, Timer};
use flamia_kernels::cuda::backward_queries::{
    BackwardQueries, BackwardQueriesCall, BackwardQueriesConfig, BackwardQueriesError, BackwardWork,
};
use flamia_kernels::cuda::call::{CallShape, CallTensors, Kernels};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{
    Forms, ForwardOutput, Quantisation, QuantiseCall, Quantised, Quantiser,
};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_kernels::{Mask, Options, Path, Profile};
use flamia_sched::Documents;
use flamia_sched::cuda::ScheduleHeader;
use flamia_sched::work::{HeadSections, Pass};
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

const HEADS: usize = 16;
const REPLAYS: usize = 15;
const WARM_UP: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let kernels = Kernels::new(Gpu::new(0)?);
    let mut skewed = vec![8192];
    skewed.extend([256; 32]);
    let workloads = [
        ("4x4096", vec![4096; 4]),
        ("16x1024", vec![1024; 16]),
        ("1x16384", vec![16384]),
        ("8192+32x256", skewed),
    ];
    for head_dim in [HeadDim::D128, HeadDim::D64] {
        for mask in [Mask::Causal, Mask::Full] {
            for (name, lengths) in &workloads {
                let bench = Bench::new(&kernels, head_dim, mask, lengths)?;
                let pairs = bench.documents.visible_pairs(mask) as f64;
                let product = 2.0 * pairs * (HEADS * head_dim.get()) as f64;
                let us = bench.queries()?;
                println!(
                    "{:3} {mask:6} {name:12}: dQ {us:8.1} us {:6.0} TFLOP/s",
                    head_dim.get(),
                    3.0 * product / us / 1e6
                );
            }
        }
    }
    Ok(())
}

struct Bench<'a> {
    gpu: &'a Gpu,
    documents: Documents,
    head_dim: HeadDim,
    mask: Mask,
    operands: [(Buffer<u8>, Quantised); 4],
    dq: Buffer<u16>,
    /// Kept for `work` and `counter`.
    _schedule: Buffer<u8>,
    work: BackwardWork,
    counter: u64,
}

impl<'a> Bench<'a> {
    fn new(
        kernels: &'a Kernels,
        head_dim: HeadDim,
        mask: Mask,
        lengths: &[usize],
    ) -> Result<Self, Box<dyn Error>> {
        let gpu = kernels.gpu();
        let documents = Documents::from_lengths(lengths)?;
        let shape = CallShape::of(&documents, HEADS, HEADS, head_dim.get());
        let mut options = Options::new(Path::Mxfp8, mask);
        options.profile = Profile::Hopper;
        let plan = kernels.plan(shape, &options)?;

        let elements = shape.tokens * HEADS * shape.head_dim;
        let tensor = |name, buffer: &Buffer<u16>| {
            let size = [shape.tokens, HEADS, shape.head_dim];
            DeviceTensor::packed(name, buffer.pointer(), size)
        };
        let normal = |seed| Buffer::from_slice(gpu, &gaussian(seed, elements));
        let [q, k, v, d_o] = [normal(1)?, normal(2)?, normal(3)?, normal(4)?];
        let o = Buffer::<u16>::filled(gpu, elements, 0)?;
        let lse = Buffer::<f32>::filled(gpu, shape.tokens * HEADS, 0)?;
        let cu_seqlens = Buffer::from_slice(gpu, documents.cu_seqlens())?;
        let layout = *plan.schedule_layout();
        let schedule = Buffer::<u8>::filled(gpu, layout.bytes, 0)?;
        let scratch = Buffer::<u8>::filled(gpu, plan.scratch_bytes(), 0)?;
        let place = |buffer: &Buffer<u8>| Scratch {
            address: buffer.pointer(),
            bytes: buffer.len(),
        };
        let stream = gpu.context().default_stream();
        let tensors = CallTensors {
            q: tensor("q", &q),
            k: tensor("k", &k),
            v: tensor("v", &v),
            o: tensor("o", &o),
            lse: lse.pointer(),
            cu_seqlens: cu_seqlens.pointer(),
        };
        // SAFETY: the buffers were made for the call, and are dropped once it has run.
        unsafe {
            let stream = (&*stream).into();
            kernels.build_schedule(stream, &plan, cu_seqlens.pointer(), schedule.pointer())?;
            plan.launch(stream, &tensors, schedule.pointer(), place(&scratch))?;
        }

        let rotates = options.rotates(shape.head_dim);
        let output = ForwardOutput {
            o: tensors.o,
            lse: lse.pointer(),
        };
        let operand = |input, hadamard, forms| -> Result<_, Box<dyn Error>> {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            let layout = quantisation.layout(shape.tokens, documents.len(), HEADS)?;
            let scratch = Buffer::filled(gpu, layout.bytes(), 0)?;
            let call = QuantiseCall {
                input,
                output: (forms == Forms::BothWithRowSums).then_some(output),
                cu_seqlens: cu_seqlens.pointer(),
                documents: documents.len(),
            };
            let quantiser = Quantiser::new(gpu, quantisation)?;
            // SAFETY: as above.
            let quantised = unsafe { quantiser.launch((&*stream).into(), &call, place(&scratch))? };
            gpu.synchronize()?;
            Ok((scratch, quantised))
        };
        let operands = [
            operand(tensors.q, rotates, Forms::Row)?,
            operand(tensors.k, rotates, Forms::Both)?,
            operand(tensors.v, false, Forms::Row)?,
            operand(tensor("d_o", &d_o), false, Forms::BothWithRowSums)?,
        ];
        Ok(Self {
            gpu,
            head_dim,
            mask,
            operands,
            dq: Buffer::filled(gpu, elements, 0)?,
            work: BackwardWork::of(&layout, schedule.pointer()),
            counter: schedule.pointer()
                + (layout.header + ScheduleHeader::counter_offset(Pass::Backward)) as u64,
            _schedule: schedule,
            documents,
        })
    }

    fn queries(&self) -> Result<f64, Box<dyn Error>> {
        let dims = self.head_dim.get();
        let config = BackwardQueriesConfig {
            head_dim: self.head_dim,
            mask: self.mask,
            hadamard: self.head_dim == HeadDim::D128,
        };
        let kernel = BackwardQueries::new(self.gpu, config)?;
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        let size = [self.documents.total(), HEADS, dims];
        let heads = NonZero::new(HEADS).expect("there are heads");
        let call = BackwardQueriesCall {
            q,
            d_o,
            k,
            v,
            kv_heads: HEADS,
            dq: DeviceTensor::packed("dq", self.dq.pointer(), size),
            documents: self.documents.len(),
            work: self.work,
            sections: HeadSections::whole(heads),
            counter: self.counter,
            scale: 1.0 / (dims as f64).sqrt(),
            hysteresis: 3,
        };
        let stream = self.gpu.context().new_stream()?;
        // SAFETY: all buffers are this value's, which outlives the replays below.
        let mut graph = unsafe {
            Graph::capture(self.gpu, (&*stream).into(), |stream| {
                kernel.launch(stream, &call)
            })
        }
        .map_err(|error: BackwardQueriesError| error)?;
        let mut timer = Timer::new(self.gpu)?;
        let mut times = Vec::new();
        for _ in 0..WARM_UP + REPLAYS {
            times.push(timer.time((&*stream).into(), |stream| graph.replay(stream))?);
        }
        let times = &mut times[WARM_UP..];
        times.sort_by(f64::total_cmp);
        Ok(times[REPLAYS / 2])
    }
}

/// Gaussian BF16 values; those of a million, again and again.
fn gaussian(seed: u64, count: usize) -> Vec<u16> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<u16> = (0..(1 << 20) + 7)
        .map(|_| bf16::from_f32(StandardNormal.sample(&mut rng)).to_bits())
        .collect();
    values.iter().copied().cycle().take(count).collect()
}
