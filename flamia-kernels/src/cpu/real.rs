//! The two precisions the CPU backend computes in, and their elementary functions.

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// `f32`, in which the kernels compute, or `f64`, in which they are checked.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + Sum
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// -∞, the score of a masked key.
    const NEG_INFINITY: Self;
    /// +∞, the log-sum-exp of a row that sees no key.
    const INFINITY: Self;
    /// `self * a + b` with one rounding.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// 2 to the power of `self`.
    fn exp2(self) -> Self;
    /// Base-2 logarithm.
    fn log2(self) -> Self;
    /// The larger of the two; `other` where `self` is NaN.
    fn max(self, other: Self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// Conversion from `f64`, rounding to nearest.
    fn from_f64(value: f64) -> Self;
    /// Conversion to `f64`, exact.
    fn to_f64(self) -> f64;
    /// Conversion from `f32`, exact.
    fn from_f32(value: f32) -> Self;
    /// Conversion to `f32`, rounding to nearest.
    fn to_f32(self) -> f32;
}

macro_rules! real {
    ($type:ty, $exp2:path) => {
        impl Real for $type {
            const ZERO: Self = 0.0;
            const NEG_INFINITY: Self = <$type>::NEG_INFINITY;
            const INFINITY: Self = <$type>::INFINITY;
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                <$type>::mul_add(self, a, b)
            }
            #[inline(always)]
            fn exp2(self) -> Self {
                $exp2(self)
            }
            #[inline(always)]
            fn log2(self) -> Self {
                <$type>::log2(self)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                // Written as a comparison because that is one vector instruction.
                if self > other { self } else { other }
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$type>::abs(self)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $type
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                value as $type
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
        }
    };
}

real!(f32, exp2_f32);
real!(f64, f64::exp2);

/// 2^x in `f32`, within one unit in the last place, with results under 2^-126 flushed to zero as
/// the GPU's `ex2.approx.ftz` does. Straight-line code, so that a loop over it becomes vectors.
///
/// x = n + f with n the nearest integer and |f| <= 1/2; 2^f is a degree-6 polynomial fitted
/// for the least largest relative error (2.0e-9 before rounding), and 2^n goes into the exponent
/// field.
#[inline(always)]
pub(crate) fn exp2_f32(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, kept in the low mantissa bits.
    const SHIFT: f32 = 12_582_912.0;
    // Past these bounds the result is +∞ or 0 anyway. NaN fails both comparisons and passes through.
    let clamped = if x > 128.0 { 128.0 } else { x };
    let clamped = if clamped < -127.0 { -127.0 } else { clamped };
    let shifted = clamped + SHIFT;
    let f = clamped - (shifted - SHIFT);
    let mut p = 1.535_336_2e-4_f32;
    p = p.mul_add(f, 1.339_887_4e-3);
    p = p.mul_add(f, 9.618_437e-3);
    p = p.mul_add(f, 5.550_332_6e-2);
    p = p.mul_add(f, 2.402_264_8e-1);
    p = p.mul_add(f, 6.931_472e-1);
    p = p.mul_add(f, 1.0);
    // Half of the exponent at a time: 2^n alone overflows at n = 128, where 2^f may be under 1.
    let n = shifted.to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
    let half = n >> 1;
    let low = f32::from_bits(((half + 127) << 23) as u32);
    let high = f32::from_bits(((n - half + 127) << 23) as u32);
    let value = p * low * high;
    if value < f32::MIN_POSITIVE {
        0.0
    } else {
        value
    }
}

/// Sums with a fixed number of lanes, so that vector code and scalar code add in one order.
#[inline(always)]
pub(crate) fn lane_sum<R: Real>(values: impl Iterator<Item = R>) -> R {
    const LANES: usize = 16;
    let mut lanes = [R::ZERO; LANES];
    for (i, value) in values.enumerate() {
        lanes[i % LANES] += value;
    }
    fold_lanes(&mut lanes)
}

/// Adds lanes pairwise: a tree of fixed shape.
#[inline(always)]
pub(crate) fn fold_lanes<R: Real, const LANES: usize>(lanes: &mut [R; LANES]) -> R {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            let upper = lanes[i + width];
            lanes[i] += upper;
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_accurate() {
        let mut worst = 0.0f64;
        for i in -126 * 64..=128 * 64 {
            for offset in [0.0, 0.003, 0.0071, 0.0134] {
                let x = i as f32 / 64.0 + offset;
                let exact = f64::from(x).exp2();
                if exact >= f64::from(f32::MAX) || exact < f64::from(f32::MIN_POSITIVE) {
                    continue;
                }
                let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                worst = worst.max((f64::from(exp2_f32(x)) - exact).abs() / ulp);
            }
        }
        println!("largest error {worst:.3} units in the last place");
        assert!(worst < 1.0, "{worst}");
        assert!(
            worst > 0.5,
            "an error under half a unit would mean that nothing was compared"
        );
    }

    #[test]
    fn exp2_is_exact_at_integers_and_defined_everywhere() {
        for n in -126..=127 {
            assert_eq!(exp2_f32(n as f32), 2f32.powi(n));
        }
        assert_eq!(exp2_f32(-126.5), 0.0);
        assert_eq!(exp2_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2_f32(f32::MIN), 0.0);
        assert_eq!(exp2_f32(128.0), f32::INFINITY);
        assert_eq!(exp2_f32(f32::INFINITY), f32::INFINITY);
        assert!(exp2_f32(127.99).is_finite());
        assert!(exp2_f32(f32::NAN).is_nan());
    }

    #[test]
    fn lanes_add_in_their_order() {
        let values = (0..40).map(|i| i as f32 / 8.0);
        assert_eq!(lane_sum(values), 97.5);
        assert_eq!(lane_sum(std::iter::empty::<f32>()), 0.0);
    }
}
