//! One call of the backward kernel of dQ on a GPU: operands quantised on the host, dQ between canaries.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::num::NonZero;

use flamia_cuda::{Buffer, Gpu, Graph, Stream};
use flamia_kernels::cpu;
use flamia_kernels::cuda::backward_queries::{
    BackwardQueries, BackwardQueriesCall, BackwardQueriesConfig, BackwardQueriesError, BackwardWork,
};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{Forms, Quantisation, Quantised};
use flamia_kernels::cuda::tensor::DeviceTensor;
use flamia_kernels::{MmaAccumulator, Options, Path, Profile, TensorView};
use flamia_sched::work::HeadSections;
use half::bf16;
use rand::Rng;
use rand_distr::{Distribution, StandardNormal};

use super::attention::{Problem, Shape};
use super::quantised::{ForwardOutput, Packed, expected};

/// What dQ and scratch are filled with: NaN in every format.
const POISON: u8 = 0xff;
/// Elements between the rows of dQ that nobody may touch, and before the first and after the last.
const GAP: usize = 16;
const HYSTERESIS: i32 = 3;

/// How the kernel goes about it, which must not show.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub is_dynamic: bool,
    pub heads_per_section: usize,
}

impl Way {
    pub const PLAIN: Self = Self {
        is_dynamic: false,
        heads_per_section: usize::MAX,
    };
    pub const ALL: [Self; 2] = [
        Self::PLAIN,
        Self {
            is_dynamic: true,
            heads_per_section: 1,
        },
    ];
}

/// Operands of a backward pass, with what the CPU's forward pass made of them.
pub struct Backward {
    pub problem: Problem,
    pub d_o: Vec<bf16>,
    o: Vec<bf16>,
    lse: Vec<f32>,
}

fn wide(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

impl Backward {
    pub fn new(problem: Problem, d_o: Vec<bf16>) -> Self {
        let forward = problem.on_cpu(Path::Mxfp8);
        Self {
            o: forward.o.iter().map(|x| bf16::from_f64(*x)).collect(),
            lse: forward.lse.iter().map(|x| *x as f32).collect(),
            problem,
            d_o,
        }
    }

    pub fn gaussian(shape: Shape, rng: &mut impl Rng) -> Self {
        let problem = Problem::gaussian(shape, rng);
        let d_o = problem
            .q
            .iter()
            .map(|_| bf16::from_f32(StandardNormal.sample(rng)))
            .collect();
        Self::new(problem, d_o)
    }

    /// With an O and LSE of about the right size for comparisons of bits with bits.
    pub fn without_forward(shape: Shape, rng: &mut impl Rng) -> Self {
        let problem = Problem::gaussian(shape, rng);
        let mut normal = || -> Vec<bf16> {
            let sample = |_: &bf16| bf16::from_f32(StandardNormal.sample(rng));
            problem.q.iter().map(sample).collect()
        };
        let (d_o, o) = (normal(), normal());
        let lse = vec![6.0; problem.shape.heads * problem.tokens()];
        Self {
            problem,
            d_o,
            o,
            lse,
        }
    }

    /// dQ by the CPU: of the `hopper` profile with its accumulator bit for bit, or exact.
    pub fn on_cpu(&self, path: Path) -> Vec<f64> {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = self.problem.shape;
        let mut options = Options::new(path, mask);
        let (mut o, mut lse) = (
            wide(&self.o),
            self.lse.iter().map(|x| f64::from(*x)).collect(),
        );
        if path == Path::Mxfp8 {
            options.profile = Profile::Hopper;
            options.accumulator = MmaAccumulator::Hopper;
            options.hysteresis = HYSTERESIS;
        } else {
            let exact = self.problem.on_cpu(path);
            (o, lse) = (exact.o, exact.lse);
        }
        let [q, k, v, d_o] =
            [&self.problem.q, &self.problem.k, &self.problem.v, &self.d_o].map(|x| wide(x));
        let tokens = self.problem.tokens();
        let view = |x, heads| TensorView::packed("x", x, tokens, heads, head_dim.get()).unwrap();
        cpu::backward(
            &view(&q, heads),
            &view(&k, kv_heads),
            &view(&v, kv_heads),
            &view(&o, heads),
            &lse,
            &view(&d_o, heads),
            &self.problem.documents,
            &options,
            None,
        )
        .unwrap()
        .dq
    }

    /// The kernel's dQ, and what else it wrote as an error.
    pub fn on_gpu(&self, gpu: &Gpu, way: Way) -> Result<Vec<f64>, String> {
        let device = Device::new(gpu, self, way);
        let stream = gpu.context().new_stream().unwrap();
        device.launch((&*stream).into()).unwrap();
        device.dq()
    }

    fn dq_stride(&self) -> usize {
        self.problem.shape.heads * self.problem.shape.head_dim.get() + GAP
    }
}

/// A call with all that it needs in device memory.
pub struct Device<'a> {
    backward: &'a Backward,
    kernel: BackwardQueries,
    operands: [(Buffer<u8>, Quantised); 4],
    dq: Buffer<u16>,
    schedule: [Buffer<u8>; 2],
    counter: Buffer<u32>,
    sections: HeadSections,
}

impl<'a> Device<'a> {
    pub fn new(gpu: &Gpu, backward: &'a Backward, way: Way) -> Self {
        let problem = &backward.problem;
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let hadamard = head_dim == HeadDim::D128;
        let config = BackwardQueriesConfig {
            head_dim,
            mask,
            hadamard,
        };
        let kernel = BackwardQueries::new(gpu, config).unwrap_or_else(|error| panic!("{error}"));
        let packed = |data: &[bf16], heads| Packed {
            data: data.to_vec(),
            row_heads: heads,
            heads: 0..heads,
            head_dim: head_dim.get(),
        };
        let forward = ForwardOutput {
            o: packed(&backward.o, heads),
            lse: backward.lse.clone(),
        };
        let operands = [
            (&problem.q, heads, hadamard, Forms::Row),
            (&problem.k, kv_heads, hadamard, Forms::Both),
            (&problem.v, kv_heads, false, Forms::Row),
            (&backward.d_o, heads, false, Forms::BothWithRowSums),
        ];
        let operands = operands.map(|(data, heads, hadamard, forms)| {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            let layout = quantisation
                .layout(problem.tokens(), problem.documents.len(), heads)
                .unwrap();
            let bytes = expected(
                &problem.documents,
                &packed(data, heads),
                (forms == Forms::BothWithRowSums).then_some(&forward),
                &quantisation,
                &layout,
                POISON,
            );
            let scratch = Buffer::from_slice(gpu, &bytes).unwrap();
            let quantised = layout.at(scratch.pointer());
            (scratch, quantised)
        });
        let items = config.tiling().longest_first(&problem.documents);
        // `ScheduleHeader` as schedule.cuh has it, with the two fields that the kernel reads.
        let mut header = [0u32; 16];
        header[9] = items.len() as u32;
        header[10] = u32::from(way.is_dynamic);
        let items: Vec<i32> = items
            .iter()
            .flat_map(|item| [item.document, item.first, item.start, item.len])
            .collect();
        let upload = |bytes: &[u8]| Buffer::from_slice(gpu, bytes).unwrap();
        let number = |n: usize| NonZero::new(n).unwrap();
        Self {
            kernel,
            operands,
            dq: Buffer::filled(gpu, GAP + problem.tokens() * backward.dq_stride(), POISON).unwrap(),
            schedule: [
                upload(bytemuck::cast_slice(&header)),
                upload(bytemuck::cast_slice(&items)),
            ],
            counter: Buffer::filled(gpu, 1, 0).unwrap(),
            sections: HeadSections::new(number(heads), number(way.heads_per_section)),
            backward,
        }
    }

    pub fn call(&self) -> BackwardQueriesCall {
        let problem = &self.backward.problem;
        let Shape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = problem.shape;
        let dims = head_dim.get();
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.operands[i].1);
        BackwardQueriesCall {
            q,
            d_o,
            k,
            v,
            kv_heads,
            dq: DeviceTensor {
                name: "dq",
                address: self.dq.pointer() + (GAP * size_of::<bf16>()) as u64,
                shape: [problem.tokens(), heads, dims],
                strides: [self.backward.dq_stride(), dims, 1],
            },
            documents: problem.documents.len(),
            work: BackwardWork {
                header: self.schedule[0].pointer(),
                items: self.schedule[1].pointer(),
            },
            sections: self.sections,
            counter: self.counter.pointer(),
            scale: 1.0 / (dims as f64).sqrt(),
            hysteresis: HYSTERESIS,
        }
    }

    pub fn launch(&self, stream: Stream<'_>) -> Result<(), BackwardQueriesError> {
        // SAFETY: every buffer is this value's, made for the call, and read back before it goes.
        unsafe { self.kernel.launch(stream, &self.call()) }
    }

    /// The launch as a graph.
    pub fn capture(&self, gpu: &Gpu, stream: Stream<'_>) -> Graph {
        // SAFETY: the stream is the GPU's and idle; callers keep this value beyond the last replay.
        unsafe { Graph::capture(gpu, stream, |stream| self.launch(stream)) }
            .unwrap_or_else(|error: BackwardQueriesError| panic!("{error}"))
    }

    /// Poisons dQ again.
    pub fn forget(&mut self) {
        let len = self.dq.len();
        self.dq.upload(&vec![u16::MAX; len]).unwrap();
    }

    /// What lies in dQ, if everything around it is as it was.
    pub fn dq(&self) -> Result<Vec<f64>, String> {
        let dq = self.dq.download().unwrap();
        if self.counter.download().unwrap() != [0] {
            return Err("the counter was not left at zero".to_owned());
        }
        let row = self.backward.dq_stride() - GAP;
        let is_poison = |x: &[u16]| x.iter().all(|x| *x == u16::MAX);
        if !is_poison(&dq[..GAP]) {
            return Err("wrote in front of dQ".to_owned());
        }
        let mut values = Vec::new();
        for (token, dq) in dq[GAP..].chunks(self.backward.dq_stride()).enumerate() {
            if !is_poison(&dq[row..]) {
                return Err(format!("wrote behind row {token} of dQ"));
            }
            // The kernel's own NaN has another pattern.
            if let Some(i) = dq[..row].iter().position(|x| *x == u16::MAX) {
                return Err(format!("left element {i} of row {token} of dQ as it was"));
            }
            values.extend(dq[..row].iter().map(|x| bf16::from_bits(*x).to_f64()));
        }
        Ok(values)
    }
}
