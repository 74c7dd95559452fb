//! What the quantisers reach of the GPU's copy bandwidth, bytes read and written counted.
//!
//! `cargo run --release -p flamia-kernels --features cuda --example quantise_throughput` on a machine
//! that has a Hopper GPU, and NVRTC. Every round times each variant and the driver's copy of as many
//! bytes, in alternating order; each launch takes the next of several data sets, which together are
//! several times the L2 cache. Medians of the rounds are printed.

use std::error::Error;

use flamia_cuda::{Buffer, Gpu, GpuError, Stream, Timer};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{
    Forms, ForwardOutput, Quantisation, QuantiseCall, QuantiseError, Quantiser,
};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_sched::Documents;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

const HEADS: usize = 16;
const DOCUMENT: usize = 4096;
const ROUNDS: usize = 7;
/// Launches over every data set in one timing.
const PASSES: usize = 4;

const VARIANTS: [(&str, HeadDim, bool, Forms); 9] = [
    ("Q, K of training", HeadDim::D128, true, Forms::Both),
    ("Q, K of inference", HeadDim::D128, true, Forms::Row),
    ("V of training", HeadDim::D128, false, Forms::Both),
    ("V of inference", HeadDim::D128, false, Forms::Transposed),
    ("dO with D", HeadDim::D128, false, Forms::BothWithRowSums),
    ("Q, K, V of training", HeadDim::D64, false, Forms::Both),
    ("Q, K of training", HeadDim::D64, true, Forms::Both),
    ("V of inference", HeadDim::D64, false, Forms::Transposed),
    ("dO with D", HeadDim::D64, false, Forms::BothWithRowSums),
];

struct DataSet {
    x: Buffer<u16>,
    o: Buffer<u16>,
    lse: Buffer<f32>,
    scratch: Buffer<u8>,
}

struct Variant {
    name: String,
    quantiser: Quantiser,
    /// Read and written by one launch.
    bytes: usize,
}

impl Variant {
    fn new(
        gpu: &Gpu,
        tokens: usize,
        variant: &(&str, HeadDim, bool, Forms),
    ) -> Result<Self, QuantiseError> {
        let (name, head_dim, hadamard, forms) = *variant;
        let quantisation = Quantisation {
            head_dim,
            hadamard,
            forms,
        };
        let per_element = match forms {
            Forms::Row | Forms::Transposed => 3,
            Forms::Both => 4,
            Forms::BothWithRowSums => 6,
        };
        let rotated = if hadamard { ", rotated" } else { "" };
        Ok(Self {
            name: format!("{name}, d = {}{rotated}", head_dim.get()),
            quantiser: Quantiser::new(gpu, quantisation)?,
            bytes: tokens * HEADS * head_dim.get() * per_element,
        })
    }

    fn launch(
        &self,
        stream: Stream<'_>,
        set: &DataSet,
        documents: &Documents,
        cu_seqlens: u64,
    ) -> Result<(), QuantiseError> {
        let quantisation = self.quantiser.quantisation();
        let shape = [documents.total(), HEADS, quantisation.head_dim.get()];
        let o = DeviceTensor::packed("o", set.o.pointer(), shape);
        let output = ForwardOutput {
            o,
            lse: set.lse.pointer(),
        };
        let call = QuantiseCall {
            input: DeviceTensor::packed("x", set.x.pointer(), shape),
            output: (quantisation.forms == Forms::BothWithRowSums).then_some(output),
            cu_seqlens,
            documents: documents.len(),
        };
        let scratch = Scratch {
            address: set.scratch.pointer(),
            bytes: set.scratch.len(),
        };
        // SAFETY: the buffers hold what the call says and outlive the timing, which waits for the work.
        unsafe { self.quantiser.launch(stream, &call, scratch)? };
        Ok(())
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(gpu: &Gpu, tokens: usize) -> Result<(), Box<dyn Error>> {
    let documents = Documents::batched(tokens / DOCUMENT, DOCUMENT)?;
    let cu_seqlens = Buffer::from_slice(gpu, documents.cu_seqlens())?;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let elements = tokens * HEADS * HeadDim::D128.get();
    let gaussian: Vec<u16> = StandardNormal
        .sample_iter(&mut rng)
        .map(|x: f32| bf16::from_f32(x).to_bits())
        .take(1 << 20)
        .collect();
    let values: Vec<u16> = gaussian.iter().copied().cycle().take(elements).collect();
    let largest = Quantisation {
        head_dim: HeadDim::D128,
        hadamard: false,
        forms: Forms::BothWithRowSums,
    };
    let scratch = largest.layout(tokens, documents.len(), HEADS)?.bytes();
    let sets = (4 * gpu.l2_bytes()).div_ceil(2 * elements).max(3);
    let sets: Vec<_> = (0..sets)
        .map(|_| {
            Ok(DataSet {
                x: Buffer::from_slice(gpu, &values)?,
                o: Buffer::from_slice(gpu, &values)?,
                lse: Buffer::filled(gpu, tokens * HEADS, 0)?,
                scratch: Buffer::filled(gpu, scratch, 0)?,
            })
        })
        .collect::<Result<_, GpuError>>()?;
    let variants: Vec<_> = VARIANTS
        .iter()
        .map(|variant| Variant::new(gpu, tokens, variant))
        .collect::<Result<_, _>>()?;

    let stream = gpu.context().new_stream()?;
    let longest = variants.iter().map(|variant| variant.bytes / 2).max();
    let longest = longest.unwrap_or_default();
    let from = stream.alloc_zeros::<u8>(longest * sets.len())?;
    let mut to = stream.alloc_zeros::<u8>(longest * sets.len())?;
    let raw = Stream::from(&*stream);
    let mut timer = Timer::new(gpu)?;
    let launches = PASSES * sets.len();
    let mut times: Vec<[Vec<f64>; 2]> = variants.iter().map(|_| Default::default()).collect();
    for round in 0..=ROUNDS {
        let mut order: Vec<_> = (0..2 * variants.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for system in order {
            let (variant, is_copy) = (&variants[system / 2], system % 2 == 1);
            let total = timer.time(raw, |raw| {
                for set in (0..sets.len()).cycle().take(launches) {
                    if is_copy {
                        let first = set * longest;
                        let part = first..first + variant.bytes / 2;
                        let (from, mut to) = (from.slice(part.clone()), to.slice_mut(part));
                        let copied = stream.memcpy_dtod(&from, &mut to);
                        copied.expect("both parts have the same length");
                    } else {
                        variant.launch(raw, &sets[set], &documents, cu_seqlens.pointer())?;
                    }
                }
                Ok::<_, QuantiseError>(())
            })?;
            // The first round warms up.
            if round > 0 {
                times[system / 2][usize::from(is_copy)].push(total / launches as f64);
            }
        }
    }
    println!(
        "{tokens} tokens x {HEADS} heads in documents of {DOCUMENT}, {} data sets, {}",
        sets.len(),
        gpu.name()
    );
    for (variant, times) in variants.iter().zip(times) {
        let [time, copy] = times.map(median);
        let reached = variant.bytes as f64 / time * 1e-6;
        println!(
            "  {:36} {time:7.1} us {reached:6.3} TB/s, {:5.1} % of a copy's",
            variant.name,
            100.0 * copy / time
        );
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new(0)?;
    for tokens in [16_384, 65_536] {
        measure(&gpu, tokens)?;
    }
    Ok(())
}
