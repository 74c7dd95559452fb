//! The operands of an attention call, and its results.

use std::fmt;

use flamia_sched::{Documents, DocumentsError};
use half::bf16;
use rand::Rng;
use rand_distr::{Distribution, StandardNormal};

/// One of the operands of a training call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The gradient of the output.
    DO,
}

impl Tensor {
    /// Every operand.
    pub const ALL: [Tensor; 4] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::DO];
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Tensor::Q => "q",
            Tensor::K => "k",
            Tensor::V => "v",
            Tensor::DO => "d_o",
        })
    }
}

/// The operands of one training call on packed documents.
///
/// `q` and `d_o` are `[rows, heads, head_dim]`, `k` and `v` `[rows, kv_heads, head_dim]`, row-major;
/// query head `h` reads key/value head `h / (heads / kv_heads)`. What is drawn or read here holds
/// values of BF16, as a model's activations do.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Where documents start and end.
    pub documents: Documents,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// The gradient of the output.
    pub d_o: Vec<f32>,
}

/// What a training call gives, in float64 so that every precision fits. What was not computed is empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// `[rows, heads, head_dim]`.
    pub o: Vec<f64>,
    /// Natural log-sum-exp of the scaled scores, `[heads, rows]`.
    pub lse: Vec<f64>,
    /// `[rows, heads, head_dim]`.
    pub dq: Vec<f64>,
    /// `[rows, kv_heads, head_dim]`.
    pub dk: Vec<f64>,
    /// `[rows, kv_heads, head_dim]`.
    pub dv: Vec<f64>,
}

impl Problem {
    /// Standard normal operands.
    ///
    /// # Errors
    /// More rows than a packed row can hold.
    pub fn gaussian(
        lengths: &[usize],
        [heads, kv_heads, head_dim]: [usize; 3],
        rng: &mut impl Rng,
    ) -> Result<Self, DocumentsError> {
        let documents = Documents::from_lengths(lengths)?;
        let rows = documents.total();
        let mut normal = |heads: usize| -> Vec<f32> {
            (0..rows * heads * head_dim)
                .map(|_| bf16::from_f32(StandardNormal.sample(&mut *rng)).to_f32())
                .collect()
        };
        Ok(Self {
            q: normal(heads),
            k: normal(kv_heads),
            v: normal(kv_heads),
            d_o: normal(heads),
            documents,
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// Rows of the packed row.
    pub fn rows(&self) -> usize {
        self.documents.total()
    }

    /// Heads of an operand.
    pub fn heads_of(&self, tensor: Tensor) -> usize {
        match tensor {
            Tensor::Q | Tensor::DO => self.heads,
            Tensor::K | Tensor::V => self.kv_heads,
        }
    }

    /// An operand.
    pub fn tensor(&self, tensor: Tensor) -> &[f32] {
        match tensor {
            Tensor::Q => &self.q,
            Tensor::K => &self.k,
            Tensor::V => &self.v,
            Tensor::DO => &self.d_o,
        }
    }

    /// An operand, to be changed.
    pub fn tensor_mut(&mut self, tensor: Tensor) -> &mut [f32] {
        match tensor {
            Tensor::Q => &mut self.q,
            Tensor::K => &mut self.k,
            Tensor::V => &mut self.v,
            Tensor::DO => &mut self.d_o,
        }
    }

    /// The key/value head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// A row of a query head.
    pub fn q_row(&self, row: usize, head: usize) -> &[f32] {
        self.row(Tensor::Q, row, head)
    }

    /// A row of a key/value head's keys.
    pub fn k_row(&self, row: usize, head: usize) -> &[f32] {
        self.row(Tensor::K, row, head)
    }

    /// A row of a key/value head's values.
    pub fn v_row(&self, row: usize, head: usize) -> &[f32] {
        self.row(Tensor::V, row, head)
    }

    /// A row of a query head's output gradient.
    pub fn d_o_row(&self, row: usize, head: usize) -> &[f32] {
        self.row(Tensor::DO, row, head)
    }

    fn row(&self, tensor: Tensor, row: usize, head: usize) -> &[f32] {
        let start = (row * self.heads_of(tensor) + head) * self.head_dim;
        &self.tensor(tensor)[start..][..self.head_dim]
    }

    /// The first `rows` rows, the last document cut where they end.
    pub fn first(&self, rows: usize) -> Self {
        let rows = rows.min(self.rows());
        let lengths: Vec<usize> = self
            .documents
            .iter()
            .map(|document| document.end.min(rows).saturating_sub(document.start))
            .collect();
        let cut = |tensor| {
            let row = self.heads_of(tensor) * self.head_dim;
            self.tensor(tensor)[..rows * row].to_vec()
        };
        Self {
            documents: Documents::from_lengths(&lengths)
                .expect("fewer rows than the documents had before"),
            q: cut(Tensor::Q),
            k: cut(Tensor::K),
            v: cut(Tensor::V),
            d_o: cut(Tensor::DO),
            ..*self
        }
    }

    /// Multiplies the elements of `tensor` by `factor(row, head, feature)` and rounds them to BF16.
    pub fn scale(&mut self, tensor: Tensor, mut factor: impl FnMut(usize, usize, usize) -> f32) {
        let (heads, head_dim) = (self.heads_of(tensor), self.head_dim);
        for (i, x) in self.tensor_mut(tensor).iter_mut().enumerate() {
            let (row, head, feature) = (i / (heads * head_dim), i / head_dim % heads, i % head_dim);
            *x = bf16::from_f32(*x * factor(row, head, feature)).to_f32();
        }
    }
}
