//! One head of one document, gathered into padded buffers, and brought into the forms that the
//! products read.

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

    /// Rows with the padding.
    #[inline(always)]
    pub fn padded_len(&self) -> usize {
        self.data.len() / self.dim
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

    pub fn duplicate(&self) -> Self {
        Self {
            data: self.data.clone(),
            len: self.len,
            dim: self.dim,
        }
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

/// Which operand of attention some rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Query,
    Key,
    Value,
    OutputGradient,
}

/// An operand as each product reads it, dequantised.
pub(crate) struct Prepared<R> {
    /// For products over the head dimension.
    pub dim: Rows<R>,
    /// For products over tokens, where that is another rounding.
    pub over_tokens: Option<Contracted<R>>,
    /// On the tiles where scales are per key, for both kinds of product.
    pub per_key: Option<PerKey<R>>,
    /// Before it was rounded, if something asks for that.
    pub unrounded: Option<Rows<R>>,
}

/// What takes an operand's place on the tiles where scales are per key.
pub(crate) struct PerKey<R> {
    /// For products over the head dimension, if it differs there.
    pub dim: Option<Rows<R>>,
    /// For products over tokens.
    pub over_tokens: Contracted<R>,
}

/// An operand of products over tokens.
pub(crate) struct Contracted<R> {
    /// Values, or the values of the codes if there is a fold.
    pub rows: Rows<R>,
    pub fold: Option<Fold<R>>,
}

/// Scales of single tokens, which the other factor of a product over tokens is multiplied with
/// before it is rounded.
pub(crate) struct Fold<R> {
    /// A power of two per row; 0 for a row of zeros, NaN for one with a NaN. The codes of both are
    /// 0, so that only what is multiplied with the scale notices.
    pub factors: Vec<R>,
    /// Its exponents: -∞ for a row of zeros, NaN for one with a NaN.
    pub exponents: Vec<R>,
}

impl<R: Real> Prepared<R> {
    /// One rounding for all.
    pub fn uniform(dim: Rows<R>) -> Self {
        Self {
            dim,
            over_tokens: None,
            per_key: None,
            unrounded: None,
        }
    }

    /// What products over tokens read, on tiles with per-key scales or on the others.
    #[inline(always)]
    pub fn over_tokens(&self, per_key: bool) -> (&Rows<R>, Option<&Fold<R>>) {
        let special = self.per_key.as_ref().filter(|_| per_key);
        match special
            .map(|special| &special.over_tokens)
            .or(self.over_tokens.as_ref())
        {
            Some(contracted) => (&contracted.rows, contracted.fold.as_ref()),
            None => (&self.dim, None),
        }
    }

    /// All values that a product reads of row `row`: those over the head dimension, then those over
    /// tokens with their scales.
    pub fn magnitudes(&self, row: usize) -> impl Iterator<Item = [f64; 2]> {
        let special = self.per_key.as_ref();
        let dims = [
            Some(&self.dim),
            special.and_then(|special| special.dim.as_ref()),
        ];
        let contracted = [
            self.over_tokens.as_ref(),
            special.map(|special| &special.over_tokens),
        ];
        let norms = move |rows: &Rows<R>, scale: f64| {
            let values = rows.row(row).iter().map(|x| (x.to_f64() * scale).abs());
            let largest = values.clone().fold(0.0, f64::max);
            [values.map(|x| x * x).sum::<f64>().sqrt(), largest]
        };
        let dims = dims.into_iter().flatten().map(move |rows| norms(rows, 1.0));
        dims.chain(contracted.into_iter().flatten().map(move |contracted| {
            let scale = contracted
                .fold
                .as_ref()
                .map_or(1.0, |fold| fold.factors[row].to_f64());
            norms(&contracted.rows, scale)
        }))
    }
}

/// Brings the gathered rows of an operand into the form that products read.
pub(crate) struct Prepare<'a, S: Scheme> {
    pub scheme: &'a S,
    pub rows: Rows<S::Real>,
    pub role: Role,
    pub rotate: bool,
}

impl<S: Scheme> Task for Prepare<'_, S> {
    type Output = S::Loaded;

    #[inline(always)]
    fn run<G: Gemm>(mut self) -> S::Loaded {
        if self.rotate {
            self.scheme.rotate(&mut self.rows);
        }
        self.scheme.quantize(self.role, self.rows)
    }
}

/// The normalised Hadamard rotation of every row; its own inverse.
#[inline(always)]
pub(crate) fn rotate(rows: &mut [f32], dim: usize) {
    hadamard_rows(rows, dim).expect("Options::validate refuses other head dimensions");
}
