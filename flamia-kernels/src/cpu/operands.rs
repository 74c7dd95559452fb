//! One head of one document, gathered into padded buffers.

use flamia_format::hadamard::hadamard_rows;

use super::gemm::{Gemm, Operand, PAD, Shape};
use super::real::Real;
use super::scheme::Scheme;
use super::simd::Task;

/// The rows of one head of one document, row-major, padded with zero rows to whole token blocks.
pub struct Rows<R> {
    pub data: Vec<R>,
    /// Rows of the document.
    pub len: usize,
    pub dim: usize,
}

impl<R: Real> Rows<R> {
    pub fn zeros(len: usize, dim: usize) -> Self {
        Self {
            data: vec![R::ZERO; len.next_multiple_of(PAD) * dim],
            len,
            dim,
        }
    }

    /// The rows without the padding.
    #[inline(always)]
    pub fn unpadded_mut(&mut self) -> &mut [R] {
        &mut self.data[..self.len * self.dim]
    }

    /// From row `start` to the end of the padding.
    #[inline(always)]
    pub fn from(&self, start: usize) -> &[R] {
        &self.data[start * self.dim..]
    }

    #[inline(always)]
    pub fn row(&self, row: usize) -> &[R] {
        &self.data[row * self.dim..(row + 1) * self.dim]
    }

    /// Rows as the left operand of a product.
    #[inline(always)]
    pub fn operand(&self, start: usize) -> Operand<'_, R> {
        Operand::rows(self.from(start), self.dim)
    }
}

/// The transpose of [`Rows`] in panels of [`PAD`] rows: element `(row, col)` at
/// `[row / PAD][col][row % PAD]`. The right operand of products that contract over `dim`.
pub(crate) struct Panels<R> {
    data: Vec<R>,
    dim: usize,
}

impl<R: Real> Panels<R> {
    #[inline(always)]
    pub fn new(rows: &Rows<R>) -> Self {
        let dim = rows.dim;
        let mut data = vec![R::ZERO; rows.data.len()];
        for (panel, rows) in data
            .chunks_exact_mut(PAD * dim)
            .zip(rows.data.chunks_exact(PAD * dim))
        {
            for (i, row) in rows.chunks_exact(dim).enumerate() {
                for (j, value) in row.iter().enumerate() {
                    panel[j * PAD + i] = *value;
                }
            }
        }
        Self { data, dim }
    }

    /// `out[i][j] = a[i] · row (start + j)` for [`PAD`] rows of `a` and `width` columns;
    /// `out` has rows of `stride`.
    #[inline(always)]
    pub fn scores<G: Gemm>(
        &self,
        out: &mut [R],
        stride: usize,
        a: Operand<R>,
        start: usize,
        width: usize,
    ) {
        for row in out.chunks_mut(stride).take(PAD) {
            row[..width].fill(R::ZERO);
        }
        for col in (0..width).step_by(PAD) {
            let panel = &self.data[(start + col) * self.dim..(start + col + PAD) * self.dim];
            let shape = Shape {
                m: PAD,
                n: PAD,
                k: self.dim,
                c_stride: stride,
                b_stride: PAD,
            };
            G::accumulate(&mut out[col..], a, panel, shape);
        }
    }
}

/// Brings the gathered rows of an operand into the form that products read.
pub(crate) struct Prepare<'a, S: Scheme> {
    pub scheme: &'a S,
    pub rows: Rows<S::Real>,
    pub rotate: bool,
}

impl<S: Scheme> Task for Prepare<'_, S> {
    type Output = S::Loaded;

    #[inline(always)]
    fn run<G: Gemm>(mut self) -> S::Loaded {
        if self.rotate {
            self.scheme.rotate(&mut self.rows);
        }
        self.scheme.quantize(self.rows)
    }
}

/// The normalised Hadamard rotation of every row; its own inverse.
#[inline(always)]
pub(crate) fn rotate(rows: &mut [f32], dim: usize) {
    hadamard_rows(rows, dim).expect("head dimensions are powers of two");
}
