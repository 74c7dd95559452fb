//! The accumulator of Hopper's FP8 MMA, bit for bit.
//!
//! One step adds 32 products to an accumulator. All 33 terms are truncated toward zero to multiples
//! of 2^(E - 13), where E is the largest exponent among them (of a product: the sum of its factors'
//! exponents), added exactly, and the sum is truncated toward zero to 13 fraction bits. Measured on
//! an H200.

use crate::cpu::gemm::{Gemm, Operand, Shape};
use crate::cpu::real::Real;
use flamia_format::exponent::pow2;

/// Products per step of the MMA.
const STEP: usize = 32;
/// Fraction bits that survive.
const FRACTION: i32 = 13;
/// The exponent that E4M3 subnormals count with.
const MIN_EXPONENT: i32 = -6;

/// Products with the accumulator of Hopper's FP8 MMA; the operands hold values of E4M3 codes.
pub(crate) struct HopperMma;

impl Gemm for HopperMma {
    fn accumulate<R: Real>(c: &mut [R], a: Operand<R>, b: &[R], shape: Shape) {
        let Shape {
            m,
            n,
            k,
            c_stride,
            b_stride,
        } = shape;
        for row in 0..m {
            for col in 0..n {
                let c = &mut c[row * c_stride + col];
                let mut acc = c.to_f32();
                for step in (0..k).step_by(STEP) {
                    let factors = std::array::from_fn(|i| {
                        let depth = step + i;
                        let a = a.data[row * a.row_stride + depth * a.col_stride];
                        (a.to_f32(), b[depth * b_stride + col].to_f32())
                    });
                    acc = mma_step(acc, &factors);
                }
                *c = R::from_f32(acc);
            }
        }
    }

    fn row_sum<R: Real>(row: &[R]) -> R {
        let steps = row.chunks_exact(STEP);
        R::from_f32(steps.fold(0.0, |acc, step| {
            mma_step(acc, &std::array::from_fn(|i| (step[i].to_f32(), 1.0)))
        }))
    }
}

/// One step: `acc` plus 32 products of E4M3 values.
fn mma_step(acc: f32, factors: &[(f32, f32); STEP]) -> f32 {
    if !acc.is_finite()
        || factors
            .iter()
            .any(|(a, b)| !a.is_finite() || !b.is_finite())
    {
        return factors.iter().fold(acc, |sum, (a, b)| sum + a * b);
    }
    let products = factors
        .iter()
        .filter(|(a, b)| *a != 0.0 && *b != 0.0)
        .map(|(a, b)| exponent(*a).max(MIN_EXPONENT) + exponent(*b).max(MIN_EXPONENT));
    let largest = (acc != 0.0)
        .then(|| exponent(acc))
        .into_iter()
        .chain(products)
        .max();
    let Some(largest) = largest else { return acc };

    let unit = FRACTION - largest;
    let truncate = |x: f64| (x * 2f64.powi(unit)) as i64;
    let sum = truncate(acc.into())
        + factors
            .iter()
            .map(|(a, b)| truncate(f64::from(*a) * f64::from(*b)))
            .sum::<i64>();
    // At most 33 terms of 15 bits: exact in f32. Clearing the low bits truncates toward zero.
    let sum = sum as f32;
    f32::from_bits(sum.to_bits() & !((1 << (23 - FRACTION)) - 1)) * pow2(-unit)
}

/// The exponent of a nonzero finite number, as if it were normal.
fn exponent(x: f32) -> i32 {
    let biased = (x.to_bits() >> 23 & 0xFF) as i32;
    if biased == 0 { -127 } else { biased - 127 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(acc: f32, products: &[(f32, f32)]) -> f32 {
        let mut factors = [(0.0, 0.0); STEP];
        factors[..products.len()].copy_from_slice(products);
        mma_step(acc, &factors)
    }

    /// Readings from an H200.
    #[test]
    fn gives_what_the_chip_gave() {
        assert_eq!(step(std::f32::consts::PI, &[]), 3.141_357_4);
        assert_eq!(step(-std::f32::consts::PI, &[]), -3.141_357_4);
        // 256 + 31 · 2^-6: each small term is under 2^-13 of the largest, and so they all vanish.
        let mut products = [(0.125, 0.125); STEP];
        products[0] = (16.0, 16.0);
        assert_eq!(step(0.0, &products), 256.0);
        assert_eq!(step(256.0, &[(0.125, 0.125); STEP]), 256.0);
        // At 2^-5 all are kept exactly.
        let mut products = [(0.25, 0.125); STEP];
        products[0] = (16.0, 16.0);
        assert_eq!(step(0.0, &products), 256.0 + 31.0 / 32.0);
    }

    #[test]
    fn row_sums_are_products_with_ones() {
        let row: [f32; 128] = std::array::from_fn(|i| {
            let code = (i * 37 % 16 + 16) as f32 / 16.0;
            code * pow2((i * 29 % 16) as i32 - 8)
        });
        let mut product = [0.0];
        let shape = Shape::of_rows(1, row.len(), 1);
        HopperMma::accumulate(&mut product, Operand::rows(&row, 128), &[1.0; 128], shape);
        let sum = HopperMma::row_sum(&row);
        assert_eq!(sum, product[0]);
        let exact: f32 = row.iter().sum();
        assert!(sum < exact && sum > 0.99 * exact, "{sum} {exact}");
    }

    #[test]
    fn is_exact_where_13_bits_suffice() {
        assert_eq!(
            step(-3.0, &[(1.5, 2.0), (448.0, 0.5), (-0.25, 0.25)]),
            224.0 - 0.0625
        );
        assert_eq!(step(0.0, &[]), 0.0);
        assert!(step(0.0, &[(f32::NAN, 0.0)]).is_nan());
    }
}
