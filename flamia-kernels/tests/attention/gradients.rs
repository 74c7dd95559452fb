//! What a backward pass reads and gives, and the CPU's result.

use flamia_cuda::{Buffer, Gpu};
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::cuda::quantise::{Forms, Quantisation, Quantised};
use flamia_kernels::cuda::tensor::DeviceTensor;
use flamia_kernels::{Options, Path, TensorView, cpu};
use half::bf16;
use rand::Rng;
use rand_distr::{Distribution, StandardNormal};

use super::{GAP, HEAD_DIMS, POISON, Problem, Shape, masks};
use crate::quantised::{ForwardOutput, Packed};

/// A problem with the gradient of its result, and that result.
#[derive(Clone)]
pub struct Backward {
    pub problem: Problem,
    pub d_o: Vec<bf16>,
    o: Vec<bf16>,
    lse: Vec<f32>,
}

/// `[tokens, heads or kv_heads, head_dim]`.
#[derive(Clone)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Backward {
    /// With the result that the CPU's `hopper` profile gives.
    pub fn new(problem: Problem, d_o: Vec<bf16>) -> Self {
        let forward = problem.on_cpu(Path::Mxfp8);
        Self {
            o: forward.o.iter().map(|x| bf16::from_f64(*x)).collect(),
            lse: forward.lse.iter().map(|x| *x as f32).collect(),
            problem,
            d_o,
        }
    }

    /// With a Gaussian gradient.
    pub fn gaussian(problem: Problem, rng: &mut impl Rng) -> Self {
        let normal = |_: &bf16| bf16::from_f32(StandardNormal.sample(rng));
        let d_o = problem.q.iter().map(normal).collect();
        Self::new(problem, d_o)
    }

    /// The smallest shapes first, each of its own kind, so that a fault shows where it is simplest; none
    /// longer than `longest`, and one as long.
    pub fn simple(longest: usize, rng: &mut impl Rng) -> Vec<Self> {
        let mut problems = Vec::new();
        for head_dim in HEAD_DIMS {
            for lengths in [
                vec![1],
                vec![32],
                vec![64],
                vec![128],
                vec![192],
                vec![256],
                vec![longest],
                vec![5, 0, 70, 33],
                vec![1, 2, 31, 32, 33, 0, 63, 64, 65, 127, 128, 129],
            ] {
                for mask in masks() {
                    let shape = Shape {
                        lengths: lengths.clone(),
                        heads: 2,
                        kv_heads: 1,
                        head_dim,
                        mask,
                    };
                    let problem = Problem::gaussian(shape, rng);
                    problems.push(Self::gaussian(problem, rng));
                }
            }
        }
        problems
    }

    /// With the result of the forward pass made again, for operands that were changed.
    pub fn again(&self) -> Self {
        Self::new(self.problem.clone(), self.d_o.clone())
    }

    /// One document of it by itself.
    pub fn document(&self, rows: std::ops::Range<usize>) -> Self {
        let Problem { shape, q, k, v, .. } = &self.problem;
        let cut = |x: &[bf16], heads: usize| {
            let row = heads * shape.head_dim.get();
            x[rows.start * row..rows.end * row].to_vec()
        };
        let problem = Problem {
            shape: Shape {
                lengths: vec![rows.len()],
                ..shape.clone()
            },
            documents: flamia_sched::Documents::single(rows.len()).unwrap(),
            q: cut(q, shape.heads),
            k: cut(k, shape.kv_heads),
            v: cut(v, shape.kv_heads),
        };
        Self::new(problem, cut(&self.d_o, shape.heads))
    }

    pub fn on_cpu(&self, path: Path) -> Gradients {
        self.on_cpu_with(&self.problem.options(path))
    }

    pub fn on_cpu_with(&self, options: &Options) -> Gradients {
        let problem = &self.problem;
        let Shape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = problem.shape;
        let wide = |x: &[bf16]| x.iter().map(|x| x.to_f64()).collect::<Vec<f64>>();
        let data = [&problem.q, &problem.k, &problem.v, &self.o, &self.d_o].map(|x| wide(x));
        let lse: Vec<f64> = self.lse.iter().map(|x| f64::from(*x)).collect();
        let view = |i: usize, heads| {
            TensorView::packed("x", &data[i], problem.tokens(), heads, head_dim.get()).unwrap()
        };
        let gradients = cpu::backward(
            &view(0, heads),
            &view(1, kv_heads),
            &view(2, kv_heads),
            &view(3, heads),
            &lse,
            &view(4, heads),
            &problem.documents,
            options,
            None,
        )
        .unwrap();
        Gradients {
            dq: gradients.dq,
            dk: gradients.dk,
            dv: gradients.dv,
        }
    }

    /// Q, K, V and dO as the quantiser leaves them for the backward pass.
    pub fn operands(&self, gpu: &Gpu) -> [(Buffer<u8>, Quantised); 4] {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.problem.shape;
        let forward = ForwardOutput {
            o: Packed::whole(self.o.clone(), heads, head_dim.get()),
            lse: self.lse.clone(),
        };
        let is_rotated = head_dim == HeadDim::D128;
        let make = |data: &[bf16], heads, hadamard, forms, forward| {
            let quantisation = Quantisation {
                head_dim,
                hadamard,
                forms,
            };
            self.problem
                .quantised(gpu, data, heads, &quantisation, forward)
        };
        let Problem { q, k, v, .. } = &self.problem;
        [
            make(q, heads, is_rotated, Forms::Both, None),
            make(k, kv_heads, is_rotated, Forms::Both, None),
            make(v, kv_heads, false, Forms::Row, None),
            make(
                &self.d_o,
                heads,
                false,
                Forms::BothWithRowSums,
                Some(&forward),
            ),
        ]
    }
}

/// A BF16 result on the GPU, between canaries.
pub struct Canaried {
    buffer: Buffer<u16>,
    pub tensor: DeviceTensor,
}

impl Canaried {
    pub fn new(gpu: &Gpu, name: &'static str, [tokens, heads, head_dim]: [usize; 3]) -> Self {
        let stride = heads * head_dim + GAP;
        let buffer = Buffer::filled(gpu, GAP + tokens * stride, POISON).unwrap();
        let tensor = DeviceTensor {
            name,
            address: buffer.pointer() + (GAP * size_of::<bf16>()) as u64,
            shape: [tokens, heads, head_dim],
            strides: [stride, head_dim, 1],
        };
        Self { buffer, tensor }
    }

    /// Poisons it again.
    pub fn forget(&mut self) {
        let len = self.buffer.len();
        self.buffer.upload(&vec![u16::MAX; len]).unwrap();
    }

    /// Its values, if everything around them is as it was.
    pub fn values(&self) -> Result<Vec<f64>, String> {
        let DeviceTensor {
            name,
            shape,
            strides,
            ..
        } = self.tensor;
        let row = shape[1] * shape[2];
        let data = self.buffer.download().unwrap();
        let is_poison = |x: &[u16]| x.iter().all(|x| *x == u16::MAX);
        let (front, rows) = data.split_at(GAP);
        if !is_poison(front) {
            return Err(format!("wrote in front of {name}"));
        }
        let mut values = Vec::new();
        for (token, x) in rows.chunks(strides[0]).enumerate() {
            if !is_poison(&x[row..]) {
                return Err(format!("wrote behind row {token} of {name}"));
            }
            // The kernel's own NaN has another pattern.
            if let Some(i) = x[..row].iter().position(|x| *x == u16::MAX) {
                return Err(format!(
                    "left element {i} of row {token} of {name} as it was"
                ));
            }
            values.extend(x[..row].iter().map(|x| bf16::from_bits(*x).to_f64()));
        }
        Ok(values)
    }
}
