//! How fast the backward kernels are by themselves, operands quantised before: microseconds and TFLOP/s,
//! the median of replays of a graph. FLOPs are those of visible pairs alone, of the products that each makes: four
//! for dK and dV, three for dQ, five for the kernel of all gradients, whose times are those of its three
//! launches.
//!
//! `cargo run --release -p flamia-kernels --features cuda --example backward_throughput`

use std::error::Error;
use std::num::NonZero;

use flamia_cuda::{Buffer, Gpu, Graph, Stream, Timer};
use flamia_kernels::Mask;
use flamia_kernels::cuda::backward_fused::{
    BackwardFused, BackwardFusedCall, BackwardFusedConfig, DqSums,
};
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
    let mut very_skewed = vec![8192];
    very_skewed.extend([256; 224]);
    let workloads = [
        ("4x4096", vec![4096; 4]),
        ("16x1024", vec![1024; 16]),
        ("1x16384", vec![16384]),
        ("8192+32x256", skewed),
        ("16x4096", vec![4096; 16]),
        ("8192+224x256", very_skewed),
        ("64x256", vec![256; 64]),
        ("32x512", vec![512; 32]),
    ];
    for (head_dim, mask) in [
        (HeadDim::D128, Mask::Causal),
        (HeadDim::D128, Mask::Full),
        (HeadDim::D64, Mask::Causal),
    ] {
        for (name, lengths) in &workloads {
            let bench = Bench::new(&gpu, head_dim, mask, lengths)?;
            let pairs = bench.documents.visible_pairs(mask) as usize;
            let tflops = |products: usize, us: f64| {
                (2 * products * pairs * HEADS * head_dim.get()) as f64 / us / 1e6
            };
            let case = format!("{:3} {mask:6} {name:12}", head_dim.get());
            for per_section in [HEADS, 4] {
                let way = format!("sections of {per_section:2} heads");
                let tell = |what: &str, products, us| {
                    let rate = tflops(products, us);
                    println!("{case} {what:10} {us:8.1} us, {rate:5.0} TFLOP/s, {way}");
                };
                tell("dK and dV", 4, bench.keys(&gpu, per_section)?);
                tell("dQ", 3, bench.queries(&gpu, per_section)?);
                for sums in DqSums::ALL {
                    let us = bench.fused(&gpu, per_section, sums)?;
                    tell(&format!("all, {sums:?}"), 5, us);
                }
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
    /// dQ, dK and dV.
    gradients: [Buffer<u16>; 3],
    cu_seqlens: Buffer<i32>,
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
            item_rows: ItemRows::R192,
        };
        let (header, items, _) = schedule(gpu, &config.tiling(), &documents)?;
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
        let (_, items, item_count) = schedule(gpu, &Tiling::backward(mask), &documents)?;
        let gradient = || Buffer::filled(gpu, elements, 0);
        Ok(Self {
            head_dim,
            mask,
            operands: [q, k, v, d_o],
            gradients: [gradient()?, gradient()?, gradient()?],
            cu_seqlens,
            items,
            item_count,
            counter,
            documents,
        })
    }

    fn config(&self) -> BackwardKeysConfig {
        BackwardKeysConfig {
            head_dim: self.head_dim,
            mask: self.mask,
            rotated: self.head_dim == HeadDim::D128,
        }
    }

    fn gradient(&self, number: usize) -> DeviceTensor {
        let shape = [self.documents.total(), HEADS, self.head_dim.get()];
        DeviceTensor::packed("gradient", self.gradients[number].pointer(), shape)
    }

    fn call(&self, header: &Buffer<u32>, per_section: usize) -> BackwardKeysCall {
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        BackwardKeysCall {
            q,
            k,
            v,
            d_o,
            heads: HEADS,
            dk: self.gradient(1),
            dv: self.gradient(2),
            documents: self.documents.len(),
            work: BackwardWork {
                header: header.pointer(),
                items: self.items.pointer(),
            },
            sections: HeadSections::new(number(HEADS), number(per_section)),
            counter: self.counter.pointer(),
            scale: scale(self.head_dim),
            hysteresis: 3,
        }
    }

    fn keys(&self, gpu: &Gpu, per_section: usize) -> Result<f64, Box<dyn Error>> {
        let kernel = BackwardKeys::new(gpu, self.config())?;
        let header = header(gpu, self.item_count)?;
        let call = self.call(&header, per_section);
        // SAFETY: all buffers are this value's, which outlives the replays.
        median(gpu, |stream| unsafe {
            kernel.launch(stream, &call).map_err(Into::into)
        })
    }

    fn queries(&self, gpu: &Gpu, per_section: usize) -> Result<f64, Box<dyn Error>> {
        let config = BackwardQueriesConfig {
            head_dim: self.head_dim,
            mask: self.mask,
            rotated: self.head_dim == HeadDim::D128,
        };
        let kernel = BackwardQueries::new(gpu, config)?;
        let header = header(gpu, self.item_count)?;
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        let call = BackwardQueriesCall {
            q,
            d_o,
            k,
            v,
            kv_heads: HEADS,
            dq: self.gradient(0),
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
        // SAFETY: as in `keys`.
        median(gpu, |stream| unsafe {
            kernel.launch(stream, &call).map_err(Into::into)
        })
    }

    fn fused(&self, gpu: &Gpu, per_section: usize, sums: DqSums) -> Result<f64, Box<dyn Error>> {
        let config = BackwardFusedConfig {
            keys: self.config(),
            sums,
        };
        let kernel = BackwardFused::new(gpu, config)?;
        let header = header(gpu, self.item_count)?;
        let documents = self.documents.len();
        let scratch = config.scratch(self.documents.total(), documents, HEADS, HEADS)?;
        let memory = Buffer::<u8>::filled(gpu, scratch.bytes(), 0)?;
        let call = BackwardFusedCall {
            keys: self.call(&header, per_section),
            dq: self.gradient(0),
            cu_seqlens: self.cu_seqlens.pointer(),
            scratch: Scratch {
                address: memory.pointer(),
                bytes: scratch.bytes(),
            },
        };
        // SAFETY: all buffers outlive the replays.
        median(gpu, |stream| unsafe {
            kernel.launch(stream, &call).map_err(Into::into)
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
fn header(gpu: &Gpu, items: usize) -> Result<Buffer<u32>, Box<dyn Error>> {
    let mut header = [0u32; 16];
    header[8] = items as u32;
    header[9] = items as u32;
    Ok(Buffer::from_slice(gpu, &header)?)
}

/// The header, the items and their number.
type Schedule = (Buffer<u32>, Buffer<i32>, usize);

fn schedule(gpu: &Gpu, tiling: &Tiling, documents: &Documents) -> Result<Schedule, Box<dyn Error>> {
    // As whole calls have them.
    let items = tiling.with_section_rows(4096).longest_first(documents);
    let words: Vec<i32> = items
        .iter()
        .flat_map(|item| [item.document, item.first, item.start, item.len])
        .collect();
    Ok((
        header(gpu, items.len())?,
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
