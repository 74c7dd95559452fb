//! Small dense products on padded tiles.
//!
//! Every dimension is a multiple of [`PAD`], so there are no remainders. Each element of C is one
//! chain of fused multiply-adds in ascending `k`, whatever the register tile: the result is the
//! same on every processor, and splitting `k` over several calls changes nothing.

use super::real::Real;
use super::softmax::lane_total;

/// Rows and columns are padded to this; a token block.
pub(crate) const PAD: usize = flamia_sched::BLOCK;

/// A read-only operand: element `(row, col)` at `data[row * row_stride + col * col_stride]`.
#[derive(Clone, Copy)]
pub struct Operand<'a, R> {
    pub data: &'a [R],
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a, R> Operand<'a, R> {
    /// Rows of `row_stride` elements, read as they lie.
    #[inline(always)]
    pub fn rows(data: &'a [R], row_stride: usize) -> Self {
        Self {
            data,
            row_stride,
            col_stride: 1,
        }
    }

    /// The transpose of rows of `row_stride` elements.
    #[inline(always)]
    pub fn transposed(data: &'a [R], row_stride: usize) -> Self {
        Self {
            data,
            row_stride: 1,
            col_stride: row_stride,
        }
    }
}

/// Dimensions of a product and the strides of its row-major operands.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    pub c_stride: usize,
    pub b_stride: usize,
}

impl Shape {
    /// `m` rows of C, each a combination of `k` rows of B; rows of both are `dim` long and dense.
    #[inline(always)]
    pub fn of_rows(m: usize, k: usize, dim: usize) -> Self {
        Self {
            m,
            n: dim,
            k,
            c_stride: dim,
            b_stride: dim,
        }
    }
}

/// Products for an instruction set.
pub(crate) trait Gemm {
    /// `C += A · B`, with `C` at `c[row * c_stride + col]` and `B` at `b[row * b_stride + col]`.
    fn accumulate<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape);

    /// The product of a row of A with a column of ones.
    #[inline(always)]
    fn row_sum<R: Real>(row: &[R]) -> R {
        lane_total(row)
    }
}

/// The product, with `MR` rows by `NR` columns of C held in registers.
#[inline(always)]
pub(crate) fn accumulate<R: Real, const MR: usize, const NR: usize>(
    c: &mut [R],
    a: Operand<R>,
    b: &[R],
    shape: Shape,
) {
    const { assert!(PAD.is_multiple_of(MR) && PAD.is_multiple_of(NR)) };
    let Shape {
        m,
        n,
        k,
        c_stride,
        b_stride,
    } = shape;
    assert!(
        m.is_multiple_of(MR) && n.is_multiple_of(NR),
        "operands are padded"
    );
    for col in (0..n).step_by(NR) {
        for row in (0..m).step_by(MR) {
            let mut acc = [[R::ZERO; NR]; MR];
            for (i, acc) in acc.iter_mut().enumerate() {
                let start = (row + i) * c_stride + col;
                acc.copy_from_slice(&c[start..start + NR]);
            }
            for depth in 0..k {
                let start = depth * b_stride + col;
                let b: &[R; NR] = b[start..start + NR].try_into().expect("NR elements");
                for (i, acc) in acc.iter_mut().enumerate() {
                    let a = a.data[(row + i) * a.row_stride + depth * a.col_stride];
                    for (acc, b) in acc.iter_mut().zip(b) {
                        *acc = a.mul_add(*b, *acc);
                    }
                }
            }
            for (i, acc) in acc.iter().enumerate() {
                let start = (row + i) * c_stride + col;
                c[start..start + NR].copy_from_slice(acc);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Baseline, Task, dispatch};
    use super::*;

    struct Product<'a> {
        a: &'a [f32],
        b: &'a [f32],
        transposed: bool,
    }

    const SHAPE: Shape = Shape {
        m: 32,
        n: 64,
        k: 96,
        c_stride: 64,
        b_stride: 64,
    };

    impl Task for Product<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<G: Gemm>(self) -> Vec<f32> {
            let mut c = vec![1.0; SHAPE.m * SHAPE.n];
            let a = if self.transposed {
                Operand::transposed(self.a, SHAPE.m)
            } else {
                Operand::rows(self.a, SHAPE.k)
            };
            G::accumulate(&mut c, a, self.b, SHAPE);
            c
        }
    }

    /// The same bits with and without vector instructions, and from the plain triple loop.
    #[test]
    fn does_not_depend_on_the_instruction_set() {
        let values = |n: usize| -> Vec<f32> {
            (0..n)
                .map(|i| ((i * 2_654_435_761) as u32 as f32 / 2f32.powi(31)) - 1.0)
                .collect()
        };
        let (a, b) = (values(SHAPE.m * SHAPE.k), values(SHAPE.k * SHAPE.n));
        for transposed in [false, true] {
            let product = || Product {
                a: &a,
                b: &b,
                transposed,
            };
            let fast = dispatch(product());
            assert_eq!(fast, product().run::<Baseline>());
            for row in 0..SHAPE.m {
                for col in 0..SHAPE.n {
                    let sum = (0..SHAPE.k).fold(1.0f32, |sum, depth| {
                        let a = if transposed {
                            a[depth * SHAPE.m + row]
                        } else {
                            a[row * SHAPE.k + depth]
                        };
                        a.mul_add(b[depth * SHAPE.n + col], sum)
                    });
                    assert_eq!(fast[row * SHAPE.n + col], sum);
                }
            }
        }
    }
}
