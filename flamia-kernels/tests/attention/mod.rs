//! One call of the forward kernel on a GPU: operands quantised on the host, outputs between canaries.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

pub mod check;
pub mod fused;
pub mod gradients;
pub mod keys;
pub mod queries;
pub mod random;

use flamia_cuda::{Buffer, Gpu, Graph, Stream};
use flamia_kernels::cpu;
use flamia_kernels::cuda::forward::{
    Forward, ForwardCall, ForwardConfig, ForwardError, ForwardWork, ItemRows,
};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{Forms, Quantisation, Quantised};
use flamia_kernels::cuda::tensor::DeviceTensor;
use flamia_kernels::{Mask, MmaAccumulator, Options, Path, Profile, TensorView};
use flamia_sched::Documents;
use flamia_sched::work::{HeadSections, Pass, Tiling};
use half::bf16;
use rand::Rng;
use rand_distr::{Distribution, StandardNormal};

use super::quantised::{ForwardOutput, Packed, expected};

/// What outputs and scratch are filled with: NaN in every format.
const POISON: u8 = 0xff;
/// Elements between the rows of O that nobody may touch, and before the first and after the last.
const GAP: usize = 16;
const C: i32 = 4;
const TAU: f32 = 4.0;

pub const HEAD_DIMS: [HeadDim; 2] = [HeadDim::D128, HeadDim::D64];

pub fn masks() -> [Mask; 3] {
    [Mask::Causal, Mask::Full, Mask::window(100)]
}

/// Shapes, mask and operands.
#[derive(Clone, Debug)]
pub struct Shape {
    pub lengths: Vec<usize>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: HeadDim,
    pub mask: Mask,
}

pub fn gpu() -> Gpu {
    Gpu::new(0).unwrap_or_else(|error| panic!("{error}"))
}

/// How the kernel goes about it, which must not show.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub item_rows: ItemRows,
    pub is_dynamic: bool,
    pub heads_per_section: usize,
}

impl Way {
    pub const PLAIN: Self = Self {
        item_rows: ItemRows::R192,
        is_dynamic: false,
        heads_per_section: usize::MAX,
    };
}

/// A shape with its operands, `[tokens, heads, head_dim]`.
#[derive(Clone)]
pub struct Problem {
    pub shape: Shape,
    pub documents: Documents,
    pub q: Vec<bf16>,
    pub k: Vec<bf16>,
    pub v: Vec<bf16>,
}

/// O, `[tokens, heads, head_dim]`, and LSE, `[heads, tokens]`.
#[derive(Clone)]
pub struct Outputs {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
}

impl Outputs {
    pub fn bits(&self) -> Vec<u64> {
        self.o
            .iter()
            .chain(&self.lse)
            .map(|x| x.to_bits())
            .collect()
    }
}

impl Problem {
    /// Gaussian operands.
    pub fn gaussian(shape: Shape, rng: &mut impl Rng) -> Self {
        let documents = Documents::from_lengths(&shape.lengths).unwrap();
        let mut normal = |heads: usize| -> Vec<bf16> {
            (0..documents.total() * heads * shape.head_dim.get())
                .map(|_| bf16::from_f32(StandardNormal.sample(rng)))
                .collect()
        };
        Self {
            q: normal(shape.heads),
            k: normal(shape.kv_heads),
            v: normal(shape.kv_heads),
            documents,
            shape,
        }
    }

    pub fn tokens(&self) -> usize {
        self.documents.total()
    }

    /// The CPU's result.
    pub fn on_cpu(&self, path: Path) -> Outputs {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.shape;
        let options = self.options(path);
        let wide = |x: &[bf16]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
        let (q, k, v) = (wide(&self.q), wide(&self.k), wide(&self.v));
        let view =
            |x, heads| TensorView::packed("x", x, self.tokens(), heads, head_dim.get()).unwrap();
        let forward = cpu::forward(
            &view(&q, heads),
            &view(&k, kv_heads),
            &view(&v, kv_heads),
            &self.documents,
            &options,
            None,
        )
        .unwrap();
        Outputs {
            o: forward.o,
            lse: forward.lse,
        }
    }

    /// The kernel's result, and what else it wrote as an error.
    pub fn on_gpu(&self, gpu: &Gpu, way: Way) -> Result<Outputs, String> {
        let device = Device::new(gpu, self, way);
        let stream = gpu.context().new_stream().unwrap();
        device.launch((&*stream).into()).unwrap();
        device.outputs()
    }
}

/// A call with all that it needs in device memory.
pub struct Device<'a> {
    problem: &'a Problem,
    forward: Forward,
    operands: [(Buffer<u8>, Quantised); 3],
    o: Buffer<u16>,
    lse: Buffer<f32>,
    schedule: [Buffer<u8>; 2],
    counter: Buffer<u32>,
    sections: HeadSections,
}

impl<'a> Device<'a> {
    pub fn new(gpu: &Gpu, problem: &'a Problem, way: Way) -> Self {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let config = ForwardConfig {
            head_dim,
            mask,
            item_rows: way.item_rows,
        };
        let forward = Forward::new(gpu, config).unwrap_or_else(|error| panic!("{error}"));
        let is_rotated = head_dim == HeadDim::D128;
        let operands = [
            (&problem.q, heads, is_rotated, Forms::Row),
            (&problem.k, kv_heads, is_rotated, Forms::Row),
            (&problem.v, kv_heads, false, Forms::Transposed),
        ];
        let operands = operands.map(|(data, heads, hadamard, forms)| {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            problem.quantised(gpu, data, heads, &quantisation, None)
        });
        let number = |n: usize| std::num::NonZero::new(n).unwrap();
        Self {
            forward,
            operands,
            o: Buffer::filled(gpu, GAP + problem.tokens() * problem.o_stride(), POISON).unwrap(),
            lse: Buffer::filled(gpu, heads * problem.tokens() + GAP, POISON).unwrap(),
            schedule: schedule(gpu, &config.tiling(), &problem.documents, way.is_dynamic),
            counter: Buffer::filled(gpu, 1, 0).unwrap(),
            sections: HeadSections::new(number(heads), number(way.heads_per_section)),
            problem,
        }
    }

    pub fn call(&self) -> ForwardCall {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.problem.shape;
        let dims = head_dim.get();
        let [q, k, v] = [0, 1, 2].map(|i| self.operands[i].1);
        ForwardCall {
            q,
            k,
            v,
            kv_heads,
            o: DeviceTensor {
                name: "o",
                address: self.o.pointer() + (GAP * size_of::<bf16>()) as u64,
                shape: [self.problem.tokens(), heads, dims],
                strides: [self.problem.o_stride(), dims, 1],
            },
            lse: self.lse.pointer(),
            documents: self.problem.documents.len(),
            work: ForwardWork {
                header: self.schedule[0].pointer(),
                items: self.schedule[1].pointer(),
            },
            sections: self.sections,
            counter: self.counter.pointer(),
            scale: 1.0 / (dims as f64).sqrt(),
            c: C,
            tau: TAU,
        }
    }

    pub fn launch(&self, stream: Stream<'_>) -> Result<(), ForwardError> {
        // SAFETY: every buffer is this value's, made for the call, and read back before it goes.
        unsafe { self.forward.launch(stream, &self.call()) }
    }

    /// The launch as a graph.
    pub fn capture(&self, gpu: &Gpu, stream: Stream<'_>) -> Graph {
        // SAFETY: the stream is the GPU's and idle; callers keep this value beyond the last replay.
        unsafe { Graph::capture(gpu, stream, |stream| self.launch(stream)) }
            .unwrap_or_else(|error: ForwardError| panic!("{error}"))
    }

    /// Poisons the outputs again.
    pub fn forget(&mut self) {
        let (o, lse) = (self.o.len(), self.lse.len());
        self.o.upload(&vec![u16::MAX; o]).unwrap();
        self.lse
            .upload(&vec![f32::from_bits(u32::MAX); lse])
            .unwrap();
    }

    /// What lies in the outputs, if everything around them is as it was.
    pub fn outputs(&self) -> Result<Outputs, String> {
        let (o, lse) = (self.o.download().unwrap(), self.lse.download().unwrap());
        if self.counter.download().unwrap() != [0] {
            return Err("the counter was not left at zero".to_owned());
        }
        let row = self.problem.shape.heads * self.problem.shape.head_dim.get();
        let is_poison = |x: &[u16]| x.iter().all(|x| *x == u16::MAX);
        if !is_poison(&o[..GAP]) {
            return Err("wrote in front of O".to_owned());
        }
        let mut values = Vec::new();
        for (token, o) in o[GAP..].chunks(self.problem.o_stride()).enumerate() {
            if !is_poison(&o[row..]) {
                return Err(format!("wrote behind row {token} of O"));
            }
            // The kernel's own NaN has another pattern.
            if let Some(i) = o[..row].iter().position(|x| *x == u16::MAX) {
                return Err(format!("left element {i} of row {token} of O as it was"));
            }
            values.extend(o[..row].iter().map(|x| bf16::from_bits(*x).to_f64()));
        }
        let (lse, rest) = lse.split_at(lse.len() - GAP);
        if rest.iter().any(|x| x.to_bits() != u32::MAX) {
            return Err("wrote behind LSE".to_owned());
        }
        if let Some(i) = lse.iter().position(|x| x.to_bits() == u32::MAX) {
            return Err(format!("left LSE {i} as it was"));
        }
        Ok(Outputs {
            o: values,
            lse: lse.iter().map(|x| f64::from(*x)).collect(),
        })
    }
}

/// The header and the items of a schedule with one pass.
fn schedule(
    gpu: &Gpu,
    tiling: &Tiling,
    documents: &Documents,
    is_dynamic: bool,
) -> [Buffer<u8>; 2] {
    let items = tiling.longest_first(documents);
    // `ScheduleHeader` as schedule.cuh has it, with the fields that a kernel reads.
    let mut header = [0u32; 16];
    header[match tiling.pass {
        Pass::Forward => 8,
        Pass::Backward => 9,
    }] = items.len() as u32;
    header[10] = u32::from(is_dynamic);
    let items: Vec<i32> = items
        .iter()
        .flat_map(|item| [item.document, item.first, item.start, item.len])
        .collect();
    let upload = |bytes: &[u8]| Buffer::from_slice(gpu, bytes).unwrap();
    [
        upload(bytemuck::cast_slice(&header)),
        upload(bytemuck::cast_slice(&items)),
    ]
}

impl Problem {
    /// An operand as the quantiser leaves it, made on the host.
    fn quantised(
        &self,
        gpu: &Gpu,
        data: &[bf16],
        heads: usize,
        quantisation: &Quantisation,
        forward: Option<&ForwardOutput>,
    ) -> (Buffer<u8>, Quantised) {
        let layout = quantisation
            .layout(self.tokens(), self.documents.len(), heads)
            .unwrap();
        let packed = Packed::whole(data.to_vec(), heads, self.shape.head_dim.get());
        let bytes = expected(
            &self.documents,
            &packed,
            forward,
            quantisation,
            &layout,
            POISON,
        );
        let scratch = Buffer::from_slice(gpu, &bytes).unwrap();
        let quantised = layout.at(scratch.pointer());
        (scratch, quantised)
    }

    /// The CPU's options: of the `hopper` profile with its accumulator bit for bit, or exact.
    pub fn options(&self, path: Path) -> Options {
        let mut options = Options::new(path, self.shape.mask);
        if path == Path::Mxfp8 {
            options.profile = Profile::Hopper;
            options.accumulator = MmaAccumulator::Hopper;
        }
        options
    }

    fn o_stride(&self) -> usize {
        self.shape.heads * self.shape.head_dim.get() + GAP
    }
}
