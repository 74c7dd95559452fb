//! Tensors as plain buffers with a shape and strides.

use half::bf16;

use crate::cpu::{Exactly, Real};
use crate::error::AttentionError;

/// An element type that a call reads and writes: `f32`, `f64` or `bf16`.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// What the `reference` path computes in, and the type of the log-sum-exp.
    type Real: Exactly;
    /// Conversion for computing.
    fn to_real<R: Real>(self) -> R;
    /// Conversion of a result, rounding to nearest.
    fn from_real<R: Real>(value: R) -> Self;
}

macro_rules! element {
    ($type:ty, $real:ty, $value:ident => $to:expr, $from:expr) => {
        impl Element for $type {
            type Real = $real;
            #[inline(always)]
            fn to_real<R: Real>(self) -> R {
                let $value = self;
                $to
            }
            #[inline(always)]
            fn from_real<R: Real>($value: R) -> Self {
                $from
            }
        }
    };
}

element!(f32, f32, v => R::from_f32(v), v.to_f32());
element!(f64, f64, v => R::from_f64(v), v.to_f64());
element!(bf16, f32, v => R::from_f32(v.to_f32()), bf16::from_f32(v.to_f32()));

/// A read-only tensor of shape `[batch, length, heads, head_dim]` in a flat buffer.
///
/// Packed rows are a batch of one. Row `t` of a call is row `t % length` of sequence `t / length`.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a, E> {
    data: &'a [E],
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<'a, E: Element> TensorView<'a, E> {
    /// A view with any strides, in elements. `name` is for the error.
    ///
    /// # Errors
    /// The view reaches past `data`.
    pub fn new(
        name: &'static str,
        data: &'a [E],
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self, AttentionError> {
        let empty = shape.contains(&0);
        let needed = if empty {
            0
        } else {
            // Saturating: a length that does not fit `usize` is past every buffer.
            shape.iter().zip(strides).fold(1usize, |sum, (&n, stride)| {
                sum.saturating_add((n - 1).saturating_mul(stride))
            })
        };
        if needed > data.len() {
            return Err(AttentionError::Buffer {
                tensor: name,
                shape,
                strides,
                needed,
                available: data.len(),
            });
        }
        Ok(Self {
            data,
            shape,
            strides,
        })
    }

    /// A contiguous packed tensor `[rows, heads, head_dim]`.
    ///
    /// # Errors
    /// `data` is too short.
    pub fn packed(
        name: &'static str,
        data: &'a [E],
        rows: usize,
        heads: usize,
        head_dim: usize,
    ) -> Result<Self, AttentionError> {
        let token = heads * head_dim;
        Self::new(
            name,
            data,
            [1, rows, heads, head_dim],
            [rows * token, token, head_dim, 1],
        )
    }

    /// `[batch, length, heads, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// `[batch * length, heads, head_dim]`.
    pub fn packed_shape(&self) -> [usize; 3] {
        [self.shape[0] * self.shape[1], self.shape[2], self.shape[3]]
    }
}

/// A tensor that heads can be read from, whatever its element type.
pub trait Source<R>: Sync {
    /// Copies rows `start..` of one head into `out`, a row-major `[rows, head_dim]` buffer, as far
    /// as `out` reaches. The rows lie in one sequence.
    fn gather(&self, head: usize, start: usize, out: &mut [R]);
}

impl<E: Element, R: Real> Source<R> for TensorView<'_, E> {
    fn gather(&self, head: usize, start: usize, out: &mut [R]) {
        let [_, length, _, head_dim] = self.shape;
        let [sequence, row, head_stride, element] = self.strides;
        let start = (start / length) * sequence + (start % length) * row + head * head_stride;
        for (i, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let row = &self.data[start + i * row..];
            for (out, value) in out.iter_mut().zip(row.iter().step_by(element)) {
                *out = value.to_real();
            }
        }
    }
}
