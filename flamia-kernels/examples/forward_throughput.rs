//! How fast the forward kernel is by itself, operands quantised before: milliseconds and TFLOP/s, the
//! median of replays of a graph. FLOPs are those of visible pairs alone.
//!
//! `cargo run --release -p flamia-kernels --features cuda --example forward_throughput`

use std::error::Error;
use std::num::NonZero;

use flamia_cuda::{Buffer, Gpu, Graph, Timer};
use flamia_kernels::Mask;
use flamia_kernels::cuda::forward::{
    Forward, ForwardCall, ForwardConfig, ForwardError, ForwardWork, ItemRows,
};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{Forms, Quantisation, QuantiseCall, Quantised, Quantiser};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_sched::Documents;
use flamia_sched::work::{Acquisition, HeadSections};
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

const HEADS: usize = 16;
const REPLAYS: usize = 15;
const WARM_UP: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = Gpu::new(0)?;
    let skewed = |short| [&[8192][..], &vec![256; short]].concat();
    let workloads = [
        ("4x4096", vec![4096; 4]),
        ("16x1024", vec![1024; 16]),
        ("1x16384", vec![16384]),
        ("8192+32x256", skewed(32)),
        ("8192+224x256", skewed(224)),
    ];
    for head_dim in [HeadDim::D128, HeadDim::D64] {
        for mask in [Mask::Causal, Mask::Full] {
            for (name, lengths) in &workloads {
                for item_rows in ItemRows::ALL {
                    let config = ForwardConfig {
                        head_dim,
                        mask,
                        item_rows,
                    };
                    let mut bench = Bench::new(&gpu, config, lengths)?;
                    let [sections, whole] = bench.sections(&gpu);
                    let times = [
                        bench.microseconds(&gpu, sections)?,
                        bench.microseconds(&gpu, whole)?,
                    ];
                    let flops =
                        4 * bench.documents.visible_pairs(mask) as usize * HEADS * head_dim.get();
                    let told = times
                        .map(|us| format!("{:8.1} us {:6.0} TFLOP/s", us, flops as f64 / us / 1e6));
                    println!(
                        "{:3} {mask:6} {name:12} {item_rows:?}: sections of {:2} {}, one section {}",
                        head_dim.get(),
                        sections.per_section(),
                        told[0],
                        told[1]
                    );
                }
            }
        }
    }
    Ok(())
}

struct Bench {
    forward: Forward,
    documents: Documents,
    operands: [(Buffer<u8>, Quantised); 3],
    o: Buffer<u16>,
    lse: Buffer<f32>,
    header: Buffer<u32>,
    items: Buffer<i32>,
    counter: Buffer<u32>,
}

impl Bench {
    fn new(gpu: &Gpu, config: ForwardConfig, lengths: &[usize]) -> Result<Self, Box<dyn Error>> {
        let documents = Documents::from_lengths(lengths)?;
        let tokens = documents.total();
        let dims = config.head_dim.get();
        let cu_seqlens = Buffer::from_slice(gpu, documents.cu_seqlens())?;
        let operand = |seed, hadamard, forms| -> Result<_, Box<dyn Error>> {
            let quantisation = Quantisation {
                head_dim: config.head_dim,
                hadamard,
                forms,
            };
            let input = Buffer::from_slice(gpu, &gaussian(seed, tokens * HEADS * dims))?;
            let layout = quantisation.layout(tokens, documents.len(), HEADS)?;
            let scratch = Buffer::filled(gpu, layout.bytes(), 0)?;
            let call = QuantiseCall {
                input: DeviceTensor::packed("x", input.pointer(), [tokens, HEADS, dims]),
                output: None,
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
        let rotated = config.head_dim == HeadDim::D128;
        let list = config.tiling().longest_first(&documents);
        // `ScheduleHeader`: the items of the forward pass, and whether they are acquired.
        let mut header = [0u32; 16];
        header[8] = list.len() as u32;
        header[10] =
            u32::from(Acquisition::choose(config.mask, &documents) == Acquisition::Dynamic);
        let items: Vec<i32> = list
            .iter()
            .flat_map(|item| [item.document, item.first, item.start, item.len])
            .collect();
        Ok(Self {
            forward: Forward::new(gpu, config)?,
            operands: [
                operand(1, rotated, Forms::Row)?,
                operand(2, rotated, Forms::Row)?,
                operand(3, false, Forms::Transposed)?,
            ],
            o: Buffer::filled(gpu, tokens * HEADS * dims, 0)?,
            lse: Buffer::filled(gpu, tokens * HEADS, 0)?,
            header: Buffer::from_slice(gpu, &header)?,
            items: Buffer::from_slice(gpu, &items)?,
            counter: Buffer::filled(gpu, 1, 0)?,
            documents,
        })
    }

    /// Sections whose keys and values fit half of the L2 cache, and a single one.
    fn sections(&self, gpu: &Gpu) -> [HeadSections; 2] {
        let heads = NonZero::new(HEADS).expect("there are heads");
        let bytes_per_row = 2 * self.forward.config().head_dim.get();
        let one = NonZero::<usize>::MIN;
        [
            HeadSections::fitting(
                heads,
                one,
                self.documents.total(),
                bytes_per_row,
                gpu.l2_bytes() / 2,
            ),
            HeadSections::whole(heads),
        ]
    }

    fn microseconds(&mut self, gpu: &Gpu, sections: HeadSections) -> Result<f64, Box<dyn Error>> {
        let dims = self.forward.config().head_dim.get();
        let [q, k, v] = [0, 1, 2].map(|i| self.operands[i].1);
        let call = ForwardCall {
            q,
            k,
            v,
            kv_heads: HEADS,
            o: DeviceTensor::packed("o", self.o.pointer(), [self.documents.total(), HEADS, dims]),
            lse: self.lse.pointer(),
            documents: self.documents.len(),
            work: ForwardWork {
                header: self.header.pointer(),
                items: self.items.pointer(),
            },
            sections,
            counter: self.counter.pointer(),
            scale: 1.0 / (dims as f64).sqrt(),
            c: 4,
            tau: 4.0,
        };
        let stream = gpu.context().new_stream()?;
        // SAFETY: all buffers are this value's, which outlives the replays below.
        let mut graph = unsafe {
            Graph::capture(gpu, (&*stream).into(), |stream| {
                self.forward.launch(stream, &call)
            })
        }
        .map_err(|error: ForwardError| error)?;
        let mut timer = Timer::new(gpu)?;
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
