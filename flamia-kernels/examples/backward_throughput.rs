//! How fast the backward kernels are by themselves, operands quantised before: microseconds and TFLOP/s,
//! the median of replays of a graph. FLOPs are those of visible pairs alone, of the products that each
//! kernel makes: four for dK and dV, three for dQ.
//!
//! `cargo run --release -p flamia-kernels --features cuda --example backward_throughput`

use std::error::Error;
use std::num::NonZero;

use flamia_cuda::{Buffer, Gpu, Graph, Stream, Timer};
use flamia_kernels::Mask;
use flamia_kernels::cuda::backward_keys::{
    BackwardKeys, BackwardKeysCall, BackwardKeysConfig, BackwardWork,
};
use flamia_kernels::cuda::backward_queries::{
    BackwardQueries, BackwardQueriesCall, BackwardQueriesConfig,
};
use flamia_kernels::cuda::forward::{Forward, ForwardCall, ForwardConfig, ForwardWork, ItemRows};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{
    Forms, ForwardOutput, Quantisation, QuantiseCall, Quantised, Quantiser,
};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_sched::Documents;
use flamia_sched::work::{HeadSections, Tiling};
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

const HEADS: usize = 16;
const REPLAYS: usize = 15;
const WARM_UP: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new(0)?;
    let mut skewed = vec![8192];
    skewed.extend([256; 32]);
    let workloads = [
        ("4x4096", vec![4096; 4]),
        ("16x1024", vec![1024; 16]),
        ("1x16384", vec![16384]),
        ("8192+32x256", skewed),
    ];
    for (head_dim, mask) in [
        (HeadDim::D128, Mask::Causal),
        (HeadDim::D128, Mask::Full),
        (HeadDim::D64, Mask::Causal),
    ] {
        for (name, lengths) in &workloads {
            let bench = Bench::new(&gpu, head_dim, mask, lengths)?;
            let pairs = bench.documents.visible_pairs(mask) as usize;
            let product = (2 * pairs * HEADS * head_dim.get()) as f64;
            for (per_section, is_dynamic) in [(HEADS, false), (HEADS, true), (4, true)] {
                let (dk_dv, dq) = (
                    bench.keys(&gpu, per_section, is_dynamic)?,
                    bench.queries(&gpu, per_section, is_dynamic)?,
                );
                println!(
                    "{:3} {mask:6} {name:12}: dK, dV {dk_dv:8.1} us, {:5.0} TFLOP/s; dQ {dq:8.1} us, \
                     {:5.0} TFLOP/s; sections of {per_section:2} heads, {}",
                    head_dim.get(),
                    4.0 * product / dk_dv / 1e6,
                    3.0 * product / dq / 1e6,
                    if is_dynamic { "dynamic" } else { "static" },
                );
            }
        }
    }
    Ok(())
}

/// Device memory that a launch reads, with what it stands for.
type Operand = (Buffer<u8>, Quantised);

struct Bench {
    head_dim: HeadDim,
    mask: Mask,
    documents: Documents,
    /// Q, K, V and dO.
    operands: [Operand; 4],
    gradients: [Buffer<u16>; 2],
    items: Buffer<i32>,
    item_count: usize,
    counter: Buffer<u32>,
}

impl Bench {
    fn new(
        gpu: &Gpu,
        head_dim: HeadDim,
        mask: Mask,
        lengths: &[usize],
    ) -> Result<Self, Box<dyn Error>> {
        let documents = Documents::from_lengths(lengths)?;
        let shape = [documents.total(), HEADS, head_dim.get()];
        let elements = shape.iter().product();
        let cu_seqlens = Buffer::from_slice(gpu, documents.cu_seqlens())?;
        let quantise = |seed, hadamard, forms, output| -> Result<Operand, Box<dyn Error>> {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            let input = Buffer::from_slice(gpu, &gaussian(seed, elements))?;
            let layout = quantisation.layout(documents.total(), documents.len(), HEADS)?;
            let scratch = Buffer::filled(gpu, layout.bytes(), 0)?;
            let call = QuantiseCall {
                input: DeviceTensor::packed("x", input.pointer(), shape),
                output,
                cu_seqlens: cu_seqlens.pointer(),
                documents: documents.len(),
            };
            let place = Scratch {
                address: scratch.pointer(),
                bytes: layout.bytes(),
            };
            let stream = gpu.context().default_stream();
            let quantiser = Quantiser::new(gpu, quantisation)?;
            // SAFETY: the buffers were made for the call, and dropping them waits for it.
            let quantised = unsafe { quantiser.launch((&*stream).into(), &call, place)? };
            gpu.synchronize()?;
            Ok((scratch, quantised))
        };
        let rotated = head_dim == HeadDim::D128;
        let q = quantise(1, rotated, Forms::Both, None)?;
        let k = quantise(2, rotated, Forms::Both, None)?;
        let v = quantise(3, false, Forms::Both, None)?;

        let o = Buffer::<u16>::filled(gpu, elements, 0)?;
        let lse = Buffer::<f32>::filled(gpu, documents.total() * HEADS, 0)?;
        let o_tensor = DeviceTensor::packed("o", o.pointer(), shape);
        let config = ForwardConfig {
            head_dim,
            mask,
            item_rows: ItemRows::R128,
        };
        let (header, items, _) = schedule(gpu, &config.tiling(), &documents, false)?;
        let counter = Buffer::filled(gpu, 1, 0)?;
        let call = ForwardCall {
            q: q.1,
            k: k.1,
            v: v.1,
            kv_heads: HEADS,
            o: o_tensor,
            lse: lse.pointer(),
            documents: documents.len(),
            work: ForwardWork {
                header: header.pointer(),
                items: items.pointer(),
            },
            sections: HeadSections::whole(number(HEADS)),
            counter: counter.pointer(),
            scale: scale(head_dim),
            c: 4,
            tau: 4.0,
        };
        let forward = Forward::new(gpu, config)?;
        let stream = gpu.context().default_stream();
        // SAFETY: the buffers were made for the call, and dropping them waits for it.
        unsafe { forward.launch((&*stream).into(), &call)? };
        gpu.synchronize()?;
        let output = ForwardOutput {
            o: o_tensor,
            lse: lse.pointer(),
        };
        let d_o = quantise(4, false, Forms::BothWithRowSums, Some(output))?;
        let (_, items, item_count) = schedule(gpu, &Tiling::backward(mask), &documents, false)?;
        let gradient = || Buffer::filled(gpu, elements, 0);
        Ok(Self {
            head_dim,
            mask,
            operands: [q, k, v, d_o],
            gradients: [gradient()?, gradient()?],
            items,
            item_count,
            counter,
            documents,
        })
    }

    fn keys(&self, gpu: &Gpu, per_section: usize, is_dynamic: bool) -> Result<f64, Box<dyn Error>> {
        let config = BackwardKeysConfig {
            head_dim: self.head_dim,
            mask: self.mask,
            rotated: self.head_dim == HeadDim::D128,
        };
        let kernel = BackwardKeys::new(gpu, config)?;
        let header = header(gpu, self.item_count, is_dynamic)?;
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        let shape = [self.documents.total(), HEADS, self.head_dim.get()];
        let [dk, dv] =
            [0, 1].map(|i| DeviceTensor::packed("gradient", self.gradients[i].pointer(), shape));
        let call = BackwardKeysCall {
            q,
            k,
            v,
            d_o,
            heads: HEADS,
            dk,
            dv,
            documents: self.documents.len(),
            work: BackwardWork {
                header: header.pointer(),
                items: self.items.pointer(),
            },
            sections: HeadSections::new(number(HEADS), number(per_section)),
            counter: self.counter.pointer(),
            scale: scale(self.head_dim),
            hysteresis: 3,
        };
        median(gpu, |stream| {
            // SAFETY: all buffers are this value's, which outlives the replays.
            unsafe { kernel.launch(stream, &call) }.map_err(Into::into)
        })
    }

    fn queries(
        &self,
        gpu: &Gpu,
        per_section: usize,
        is_dynamic: bool,
    ) -> Result<f64, Box<dyn Error>> {
        let config = BackwardQueriesConfig {
            head_dim: self.head_dim,
            mask: self.mask,
            rotated: self.head_dim == HeadDim::D128,
        };
        let kernel = BackwardQueries::new(gpu, config)?;
        let header = header(gpu, self.item_count, is_dynamic)?;
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        let shape = [self.documents.total(), HEADS, self.head_dim.get()];
        let call = BackwardQueriesCall {
            q,
            d_o,
            k,
            v,
            kv_heads: HEADS,
            dq: DeviceTensor::packed("dq", self.gradients[0].pointer(), shape),
            documents: self.documents.len(),
            work: BackwardWork {
                header: header.pointer(),
                items: self.items.pointer(),
            },
            sections: HeadSections::new(number(HEADS), number(per_section)),
            counter: self.counter.pointer(),
            scale: scale(self.head_dim),
            hysteresis: 3,
        };
        median(gpu, |stream| {
            // SAFETY: as in `keys`.
            unsafe { kernel.launch(stream, &call) }.map_err(Into::into)
        })
    }
}

/// The median of replays of what `launch` does, in microseconds.
fn median(
    gpu: &Gpu,
    launch: impl Fn(Stream<'_>) -> Result<(), Box<dyn Error>>,
) -> Result<f64, Box<dyn Error>> {
    let stream = gpu.context().new_stream()?;
    // SAFETY: the stream is the GPU's and idle; the graph goes before what it launches.
    let mut graph = unsafe { Graph::capture(gpu, (&*stream).into(), launch)? };
    let mut timer = Timer::new(gpu)?;
    let mut times = Vec::new();
    for _ in 0..WARM_UP + REPLAYS {
        times.push(timer.time((&*stream).into(), |stream| graph.replay(stream))?);
    }
    let times = &mut times[WARM_UP..];
    times.sort_by(f64::total_cmp);
    Ok(times[REPLAYS / 2])
}

fn scale(head_dim: HeadDim) -> f64 {
    1.0 / (head_dim.get() as f64).sqrt()
}

fn number(n: usize) -> NonZero<usize> {
    NonZero::new(n).expect("a positive number")
}

/// `ScheduleHeader` with as many items in either pass.
fn header(gpu: &Gpu, items: usize, is_dynamic: bool) -> Result<Buffer<u32>, Box<dyn Error>> {
    let mut header = [0u32; 16];
    header[8] = items as u32;
    header[9] = items as u32;
    header[10] = u32::from(is_dynamic);
    Ok(Buffer::from_slice(gpu, &header)?)
}

/// The header, the items and their number.
type Schedule = (Buffer<u32>, Buffer<i32>, usize);

fn schedule(
    gpu: &Gpu,
    tiling: &Tiling,
    documents: &Documents,
    is_dynamic: bool,
) -> Result<Schedule, Box<dyn Error>> {
    let items = tiling.longest_first(documents);
    let words: Vec<i32> = items
        .iter()
        .flat_map(|item| [item.document, item.first, item.start, item.len])
        .collect();
    Ok((
        header(gpu, items.len(), is_dynamic)?,
        Buffer::from_slice(gpu, &words)?,
        items.len(),
    ))
}

/// Gaussian BF16 values; those of a million, again and again.
fn gaussian(seed: u64, count: usize) -> Vec<u16> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<u16> = (0..(1 << 20) + 7)
        .map(|_| bf16::from_f32(StandardNormal.sample(&mut rng)).to_bits())
        .collect();
    values.iter().copied().cycle().take(count).collect()
}
