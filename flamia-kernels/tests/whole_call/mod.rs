//! A whole call on a GPU, from BF16 to BF16: the schedule, the quantisers and the forward pass.
#![allow(dead_code, reason = "each test binary uses a part")]

use flamia_cuda::{Buffer, Stream};
use flamia_kernels::cuda::call::{CallError, CallShape, CallTensors, ForwardPlan, Kernels};
use flamia_kernels::cuda::tensor::{DeviceTensor, Scratch};
use flamia_kernels::{Mask, Options, Path, Profile};
use flamia_sched::Documents;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

use super::attention::{Outputs, Problem, Shape};

/// What outputs are filled with: a NaN that no kernel writes.
pub const POISON: u16 = 0xffff;

pub fn kernels() -> Kernels {
    Kernels::new(flamia_cuda::Gpu::new(0).unwrap_or_else(|error| panic!("{error}")))
}

pub fn options(mask: Mask) -> Options {
    let mut options = Options::new(Path::Mxfp8, mask);
    options.profile = Profile::Hopper;
    options
}

/// The boundaries of documents, the last one again until there are `entries`.
pub fn boundaries(documents: &Documents, entries: usize) -> Vec<i32> {
    let mut cu_seqlens = documents.cu_seqlens().to_vec();
    cu_seqlens.resize(entries, documents.total() as i32);
    cu_seqlens
}

pub fn bits(values: &[bf16]) -> &[u16] {
    values.reinterpret_cast()
}

/// Everything of one call in device memory.
pub struct Call {
    pub plan: ForwardPlan,
    /// Memory behind [`Call::q`], [`Call::k`] and [`Call::v`].
    pub operands: Vec<Buffer<u16>>,
    pub q: DeviceTensor,
    pub k: DeviceTensor,
    pub v: DeviceTensor,
    pub o: DeviceTensor,
    pub o_buffer: Buffer<u16>,
    pub lse: Buffer<f32>,
    pub cu_seqlens: Buffer<i32>,
    schedule: Buffer<u8>,
    scratch: Buffer<u8>,
}

impl Call {
    /// Of contiguous tensors. With room for `entries` boundaries, all of them past the documents' own
    /// the last one again.
    pub fn new(kernels: &Kernels, problem: &Problem, entries: usize) -> Self {
        let gpu = kernels.gpu();
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let shape = CallShape {
            documents: entries - 1,
            ..CallShape::of(&problem.documents, heads, kv_heads, head_dim.get())
        };
        let plan = kernels
            .plan(shape, &options(mask))
            .unwrap_or_else(|error| panic!("{error}"));
        let operands: Vec<_> = [&problem.q, &problem.k, &problem.v]
            .map(|data| Buffer::from_slice(gpu, bits(data)).unwrap())
            .into();
        let rows = shape.tokens * heads;
        let o_buffer = Buffer::filled(gpu, rows * shape.head_dim, 0xff).unwrap();
        let tensor = |name, buffer: &Buffer<u16>, heads| {
            let shape = [shape.tokens, heads, shape.head_dim];
            DeviceTensor::packed(name, buffer.pointer(), shape)
        };
        Self {
            q: tensor("q", &operands[0], heads),
            k: tensor("k", &operands[1], kv_heads),
            v: tensor("v", &operands[2], kv_heads),
            o: tensor("o", &o_buffer, heads),
            operands,
            o_buffer,
            lse: Buffer::filled(gpu, rows, 0xff).unwrap(),
            cu_seqlens: Buffer::from_slice(gpu, &boundaries(&problem.documents, entries)).unwrap(),
            schedule: Buffer::filled(gpu, plan.schedule_layout().bytes, 0xff).unwrap(),
            scratch: Buffer::filled(gpu, plan.scratch_bytes(), 0xff).unwrap(),
            plan,
        }
    }

    pub fn give(&self, kernels: &Kernels, stream: Stream<'_>) -> Result<(), CallError> {
        let tensors = CallTensors {
            q: self.q,
            k: self.k,
            v: self.v,
            o: self.o,
            lse: self.lse.pointer(),
            cu_seqlens: self.cu_seqlens.pointer(),
        };
        let scratch = Scratch {
            address: self.scratch.pointer(),
            bytes: self.scratch.len(),
        };
        let (cu_seqlens, schedule) = (self.cu_seqlens.pointer(), self.schedule.pointer());
        // SAFETY: all buffers are of the plan's sizes and outlive the download, which waits.
        unsafe {
            kernels.build_schedule(stream, &self.plan, cu_seqlens, schedule)?;
            self.plan.launch(stream, &tensors, schedule, scratch)
        }
    }

    /// Makes the call and waits for it.
    pub fn run(&self, kernels: &Kernels) {
        let stream = kernels.gpu().context().new_stream().unwrap();
        self.give(kernels, (&*stream).into())
            .unwrap_or_else(|error| panic!("{error}"));
        kernels.gpu().synchronize().unwrap();
    }

    /// What lies in contiguous outputs.
    pub fn outputs(&self) -> Outputs {
        self.raw().widened()
    }

    /// The same, as the kernel left it.
    pub fn raw(&self) -> Raw {
        Raw {
            o: self.o_buffer.download().unwrap(),
            lse: self.lse.download().unwrap(),
        }
    }
}

/// O, `[tokens, heads, head_dim]` in BF16, and LSE, `[heads, tokens]`.
pub struct Raw {
    pub o: Vec<u16>,
    pub lse: Vec<f32>,
}

impl Raw {
    pub fn widened(&self) -> Outputs {
        Outputs {
            o: wide(&self.o).collect(),
            lse: self.lse.iter().map(|x| f64::from(*x)).collect(),
        }
    }

    /// Whether something was written everywhere.
    pub fn is_whole(&self) -> bool {
        self.o.par_iter().all(|x| *x != POISON)
            && self.lse.par_iter().all(|x| x.to_bits() != u32::MAX)
    }

    pub fn is_bitwise(&self, other: &Self) -> bool {
        let bits = |lse: &[f32]| lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        self.o == other.o && bits(&self.lse) == bits(&other.lse)
    }

    /// What of it belongs to a query head of a document of the problem.
    pub fn part(&self, problem: &Problem, part: Part) -> Outputs {
        let (heads, dims) = (problem.shape.heads, problem.shape.head_dim.get());
        let rows = part.rows(problem);
        let row = |token: usize| wide(&self.o[(token * heads + part.head) * dims..][..dims]);
        let lse = &self.lse[part.head * problem.tokens()..][rows.clone()];
        Outputs {
            o: rows.flat_map(row).collect(),
            lse: lse.iter().map(|x| f64::from(*x)).collect(),
        }
    }
}

fn wide(o: &[u16]) -> impl Iterator<Item = f64> {
    o.iter().map(|x| bf16::from_bits(*x).to_f64())
}

/// A query head of a document.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub document: usize,
    pub head: usize,
}

impl Part {
    pub fn rows(&self, problem: &Problem) -> std::ops::Range<usize> {
        problem.documents.get(self.document).unwrap()
    }

    /// The part as a problem of its own.
    pub fn of(&self, problem: &Problem) -> Problem {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            mask,
            ..
        } = problem.shape;
        let rows = self.rows(problem);
        let cut = |x: &[bf16], heads: usize, head: usize| -> Vec<bf16> {
            let dims = head_dim.get();
            rows.clone()
                .flat_map(|token| x[(token * heads + head) * dims..][..dims].to_vec())
                .collect()
        };
        let kv_head = self.head / (heads / kv_heads);
        Problem {
            q: cut(&problem.q, heads, self.head),
            k: cut(&problem.k, kv_heads, kv_head),
            v: cut(&problem.v, kv_heads, kv_head),
            documents: Documents::single(rows.len()).unwrap(),
            shape: Shape {
                lengths: vec![rows.len()],
                heads: 1,
                kv_heads: 1,
                head_dim,
                mask,
            },
        }
    }
}

/// The rows of a problem of one document and one head.
pub fn cut(problem: &Problem, rows: std::ops::Range<usize>) -> Problem {
    let dims = problem.shape.head_dim.get();
    let cut = |x: &[bf16]| x[rows.start * dims..rows.end * dims].to_vec();
    Problem {
        q: cut(&problem.q),
        k: cut(&problem.k),
        v: cut(&problem.v),
        documents: Documents::single(rows.len()).unwrap(),
        shape: Shape {
            lengths: vec![rows.len()],
            ..problem.shape.clone()
        },
    }
}

/// Gaussian operands, for shapes that take long to draw: every row is a stretch of a pool, one pool for
/// each operand.
pub fn pooled(shape: Shape, seed: u64) -> Problem {
    const POOL: usize = 1 << 20;
    let documents = Documents::from_lengths(&shape.lengths).unwrap();
    let dims = shape.head_dim.get();
    let draw = |heads: usize, stream: u64| -> Vec<bf16> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        let normal = |_| bf16::from_f32(StandardNormal.sample(&mut rng));
        let pool: Vec<_> = (0..POOL + dims).map(normal).collect();
        let mut values = vec![bf16::ZERO; documents.total() * heads * dims];
        let rows = values.par_chunks_exact_mut(dims).enumerate();
        rows.for_each(|(row, values)| {
            // A multiplicative hash: neighbours lie far apart.
            let place = (row as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
            values.copy_from_slice(&pool[place as usize..][..dims]);
        });
        values
    };
    Problem {
        q: draw(shape.heads, 0),
        k: draw(shape.kv_heads, 1),
        v: draw(shape.kv_heads, 2),
        documents,
        shape,
    }
}
