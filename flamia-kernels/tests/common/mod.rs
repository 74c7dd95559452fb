//! The oracle: attention written down as in a textbook, in float64, one entry at a time.
#![allow(dead_code, reason = "each test binary uses a part")]

use flamia_kernels::{Mask, Options, TensorView, cpu};
use flamia_sched::Documents;
use half::bf16;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// The operands of a call, as f64 values that BF16 holds exactly.
#[derive(Clone)]
pub struct Problem {
    pub documents: Documents,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub d_o: Vec<f64>,
}

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

pub fn to_bf16(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}

impl Problem {
    /// Gaussian operands.
    pub fn gaussian(
        lengths: &[usize],
        [heads, kv_heads, head_dim]: [usize; 3],
        rng: &mut impl Rng,
    ) -> Self {
        let documents = Documents::from_lengths(lengths).unwrap();
        let rows = documents.total();
        let mut normal = |heads: usize| -> Vec<f64> {
            (0..rows * heads * head_dim)
                .map(|_| to_bf16(StandardNormal.sample(&mut *rng)))
                .collect()
        };
        Self {
            q: normal(heads),
            k: normal(kv_heads),
            v: normal(kv_heads),
            d_o: normal(heads),
            documents,
            heads,
            kv_heads,
            head_dim,
        }
    }

    pub fn rows(&self) -> usize {
        self.documents.total()
    }

    /// Row `row` of head `head` of a tensor with `heads` heads.
    pub fn row_of<'a>(&self, x: &'a [f64], heads: usize, row: usize, head: usize) -> &'a [f64] {
        &x[(row * heads + head) * self.head_dim..][..self.head_dim]
    }

    /// The part of the problem that document `index` is.
    pub fn document(&self, index: usize) -> Self {
        let rows = self.documents.get(index).unwrap();
        let cut = |x: &[f64], heads: usize| {
            let token = heads * self.head_dim;
            x[rows.start * token..rows.end * token].to_vec()
        };
        Self {
            documents: Documents::single(rows.len()).unwrap(),
            q: cut(&self.q, self.heads),
            k: cut(&self.k, self.kv_heads),
            v: cut(&self.v, self.kv_heads),
            d_o: cut(&self.d_o, self.heads),
            ..*self
        }
    }
}

/// Everything a forward and backward pass gives, as f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    pub o: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

impl Results {
    /// Names beside the tensors that are laid out `[rows, heads, head_dim]`.
    pub fn tensors(&self) -> [(&'static str, &[f64]); 4] {
        [
            ("o", &self.o),
            ("dq", &self.dq),
            ("dk", &self.dk),
            ("dv", &self.dv),
        ]
    }
}

/// Textbook attention in float64.
pub fn oracle(problem: &Problem, mask: Mask) -> Results {
    let Problem {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *problem;
    let rows = problem.rows();
    let scale = 1.0 / (head_dim as f64).sqrt();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut results = Results {
        o: vec![0.0; rows * heads * head_dim],
        lse: vec![f64::INFINITY; heads * rows],
        dq: vec![0.0; rows * heads * head_dim],
        dk: vec![0.0; rows * kv_heads * head_dim],
        dv: vec![0.0; rows * kv_heads * head_dim],
    };
    for document in problem.documents.iter() {
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            for i in document.clone() {
                let q = problem.row_of(&problem.q, heads, i, head);
                let d_o = problem.row_of(&problem.d_o, heads, i, head);
                let keys = match mask {
                    Mask::Causal => document.start..i + 1,
                    Mask::Full => document.clone(),
                    Mask::Window(keys) => {
                        document.start.max((i + 1).saturating_sub(keys.get()))..i + 1
                    }
                };
                let k = |j| problem.row_of(&problem.k, kv_heads, j, kv_head);
                let v = |j| problem.row_of(&problem.v, kv_heads, j, kv_head);

                let s: Vec<f64> = keys.clone().map(|j| scale * dot(q, k(j))).collect();
                let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = s.iter().map(|s| (s - max).exp()).sum();
                let lse = max + sum.ln();
                results.lse[head * rows + i] = lse;
                let p: Vec<f64> = s.iter().map(|s| (s - lse).exp()).collect();
                let dp: Vec<f64> = keys.clone().map(|j| dot(d_o, v(j))).collect();
                let mean = dot(&p, &dp);
                for ((j, p), dp) in keys.zip(&p).zip(&dp) {
                    let ds = p * (dp - mean) * scale;
                    for c in 0..head_dim {
                        let (row, kv_row) = (
                            (i * heads + head) * head_dim,
                            (j * kv_heads + kv_head) * head_dim,
                        );
                        results.o[row + c] += p * v(j)[c];
                        results.dq[row + c] += ds * k(j)[c];
                        results.dk[kv_row + c] += ds * q[c];
                        results.dv[kv_row + c] += p * d_o[c];
                    }
                }
            }
        }
    }
    results
}

/// The backend's results on the same operands, read as `E`.
pub fn compute<E: flamia_kernels::Element>(problem: &Problem, options: &Options) -> Results {
    compute_with_stats::<E>(problem, options, None)
}

pub fn compute_with_stats<E: flamia_kernels::Element>(
    problem: &Problem,
    options: &Options,
    stats: Option<&flamia_kernels::Stats>,
) -> Results {
    let read = |x: &[f64]| x.iter().map(|x| E::from_real(*x)).collect::<Vec<E>>();
    compute_through(problem, options, stats, 0, read)
}

/// As `compute` in BF16, for documents of equal length as `batch` sequences, with unused elements
/// between them.
pub fn compute_batched(problem: &Problem, batch: usize, options: &Options) -> Results {
    const GAP: usize = 7;
    let read = |x: &[f64]| -> Vec<bf16> {
        x.chunks(x.len() / batch)
            .flat_map(|sequence| {
                let gap = [bf16::NAN; GAP];
                let values = sequence.iter().map(|x| bf16::from_f64(*x));
                values.chain(gap).collect::<Vec<_>>()
            })
            .collect()
    };
    compute_through(problem, options, None, GAP, read)
}

/// Operands are read through `read`, which leaves `gap` elements after each document if that is not
/// zero; the documents then are the sequences of a batch.
fn compute_through<E: flamia_kernels::Element>(
    problem: &Problem,
    options: &Options,
    stats: Option<&flamia_kernels::Stats>,
    gap: usize,
    read: impl Fn(&[f64]) -> Vec<E>,
) -> Results {
    use flamia_kernels::cpu::Real;
    let Problem {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *problem;
    let batch = if gap == 0 { 1 } else { problem.documents.len() };
    let length = problem.rows() / batch;
    fn view<E: flamia_kernels::Element>(
        x: &[E],
        [batch, length, heads, head_dim]: [usize; 4],
        gap: usize,
    ) -> TensorView<'_, E> {
        let token = heads * head_dim;
        let strides = [length * token + gap, token, head_dim, 1];
        TensorView::new("x", x, [batch, length, heads, head_dim], strides).unwrap()
    }
    let [q, k, v, d_o] = [&problem.q, &problem.k, &problem.v, &problem.d_o].map(|x| read(x));
    let (queries, keys) = (
        [batch, length, heads, head_dim],
        [batch, length, kv_heads, head_dim],
    );
    let (q, k, v) = (
        view(&q, queries, gap),
        view(&k, keys, gap),
        view(&v, keys, gap),
    );
    let forward = cpu::forward(&q, &k, &v, &problem.documents, options, stats).unwrap();
    let (o, d_o) = (view(&forward.o, queries, 0), view(&d_o, queries, gap));
    let gradients = cpu::backward(
        &q,
        &k,
        &v,
        &o,
        &forward.lse,
        &d_o,
        &problem.documents,
        options,
        stats,
    )
    .unwrap();
    let back = |x: &[E]| x.iter().map(|x| x.to_real::<f64>()).collect::<Vec<f64>>();
    Results {
        o: back(&forward.o),
        lse: forward.lse.iter().map(|x| x.to_f64()).collect(),
        dq: back(&gradients.dq),
        dk: back(&gradients.dk),
        dv: back(&gradients.dv),
    }
}

pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The largest difference, as a share of the largest magnitude. NaN if anything is NaN.
pub fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected
        .iter()
        .fold(f64::MIN_POSITIVE, |m, x| m.max(x.abs()));
    found.iter().zip(expected).fold(0.0, |worst: f64, (a, b)| {
        let error = (a - b).abs() / scale;
        if error > worst || error.is_nan() {
            error
        } else {
            worst
        }
    })
}

/// Bit patterns, so that NaN and the sign of zero count.
pub fn bits(x: &[f64]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A random document length that likes the edges of blocks and tiles.
pub fn edgy_length(rng: &mut impl Rng) -> usize {
    const EDGES: [usize; 12] = [0, 1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257];
    if rng.random_bool(0.5) {
        EDGES[rng.random_range(0..EDGES.len())]
    } else {
        rng.random_range(0..300)
    }
}
