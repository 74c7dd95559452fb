//! How a block's shared exponent follows from its largest magnitude.

use crate::Ue8m0;

/// Which power of two a block is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExponentRule {
    /// The smallest `e` with `amax · 2^-e <= 448`: no element is ever clamped. A later, larger
    /// element of the block can then only move earlier ones within E4M3's subnormal range.
    #[default]
    Up,
    /// The MX specification's conversion, `floor(log2(amax)) - 8`. It leaves `amax · 2^-e` in
    /// 256..512, so that up to an eighth of the largest element is clamped away, and a later element
    /// that ends the clamping changes earlier ones: the leak that attention's causality probe shows.
    Floor,
}

const MANTISSA_BITS: u32 = 23;
const MANTISSA: u32 = (1 << MANTISSA_BITS) - 1;
const BIAS: i32 = 127;
/// Largest biased exponent of a finite value.
const MAX_BIASED: i32 = 254;
/// Exponent of E4M3's largest binade, 256..=448.
const E4M3_MAX_EXP: i32 = 8;
/// Mantissa bits of 1.75, as in 448 = 1.75 · 2^8.
const E4M3_MAX_MANTISSA: u32 = 0x60_0000;

/// The scale of a block whose largest magnitude is `amax`. `amax`'s sign does not matter.
///
/// NaN and infinity give [`Ue8m0::NAN`], zero gives [`Ue8m0::ZERO_BLOCK`]. An `amax` that asks for
/// less than 2^-127, the smallest scale, gets that one: from about 2^-119 down, a block uses less
/// and less of E4M3's range, and magnitudes up to 2^-137 round to zero.
#[inline(always)]
pub const fn block_exponent(amax: f32, rule: ExponentRule) -> Ue8m0 {
    let bits = amax.to_bits();
    let biased = ((bits >> MANTISSA_BITS) & 0xFF) as i32;
    if biased > MAX_BIASED {
        return Ue8m0::NAN;
    }
    // Zero and subnormals have biased exponent 0, which ends at the smallest scale either way.
    let e = biased - BIAS - E4M3_MAX_EXP;
    let above_largest_code = bits & MANTISSA > E4M3_MAX_MANTISSA;
    match rule {
        ExponentRule::Up => Ue8m0::from_exponent(e + above_largest_code as i32),
        ExponentRule::Floor => Ue8m0::from_exponent(e),
    }
}

/// 2^`e`, exact from the smallest subnormal (`e` = -149) to `e` = 127; 0 below, infinity above.
#[inline(always)]
pub const fn pow2(e: i32) -> f32 {
    const SMALLEST_NORMAL: i32 = 1 - BIAS;
    const SMALLEST: i32 = SMALLEST_NORMAL - MANTISSA_BITS as i32;
    if e > BIAS {
        f32::INFINITY
    } else if e >= SMALLEST_NORMAL {
        f32::from_bits(((e + BIAS) as u32) << MANTISSA_BITS)
    } else if e >= SMALLEST {
        f32::from_bits(1 << (e - SMALLEST))
    } else {
        0.0
    }
}
