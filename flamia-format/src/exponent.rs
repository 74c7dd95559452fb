//! How a block's shared exponent follows from its largest magnitude.

use crate::{E2M1, E4M3, Ue8m0};

/// The element format of a block with a power-of-two scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 8 bits, see [`E4M3`].
    E4M3,
    /// 4 bits, see [`E2M1`].
    E2M1,
}

impl Element {
    /// The largest value.
    #[inline(always)]
    pub const fn max(self) -> f32 {
        match self {
            Element::E4M3 => E4M3::MAX,
            Element::E2M1 => E2M1::MAX,
        }
    }

    /// Bits of one code.
    #[inline(always)]
    pub const fn bits(self) -> usize {
        match self {
            Element::E4M3 => 8,
            Element::E2M1 => 4,
        }
    }
}

/// Which power of two a block is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExponentRule {
    /// The smallest `e` with `amax · 2^-e <= max`, `max` the element's largest value: nothing is
    /// ever clamped. A later, larger element of the block can then only move earlier ones within
    /// the element's subnormal range.
    #[default]
    Up,
    /// The MX specification's conversion, the exponent of `amax` less that of `max`. It leaves
    /// `amax · 2^-e` in 256..512 for E4M3 and in 4..8 for E2M1, so that up to an eighth or a quarter
    /// of the largest element is clamped away, and a later element that ends the clamping changes
    /// earlier ones: the leak that attention's causality probe shows.
    Floor,
}

const MANTISSA_BITS: u32 = 23;
const MANTISSA: u32 = (1 << MANTISSA_BITS) - 1;
const BIAS: i32 = 127;
/// Largest biased exponent of a finite value.
const MAX_BIASED: i32 = 254;

/// The scale of a block of E4M3 elements, [`block_exponent_of`] with [`Element::E4M3`].
#[inline(always)]
pub const fn block_exponent(amax: f32, rule: ExponentRule) -> Ue8m0 {
    block_exponent_of(amax, Element::E4M3, rule)
}

/// The scale of a block whose largest magnitude is `amax`. `amax`'s sign does not matter.
///
/// NaN and infinity give [`Ue8m0::NAN`], zero gives [`Ue8m0::ZERO_BLOCK`]. An `amax` that asks for
/// less than 2^-127, the smallest scale, gets that one: from about 2^-119 (E4M3) or 2^-125 (E2M1)
/// down, a block uses less and less of its element's range, and magnitudes up to 2^-137 or 2^-129
/// round to zero.
#[inline(always)]
pub const fn block_exponent_of(amax: f32, element: Element, rule: ExponentRule) -> Ue8m0 {
    let bits = amax.to_bits();
    let biased = biased_exponent(bits);
    if biased > MAX_BIASED {
        return Ue8m0::NAN;
    }
    let max = element.max().to_bits();
    // Zero and subnormals have biased exponent 0, which ends at the smallest scale either way.
    let e = biased - biased_exponent(max);
    let above_largest_code = bits & MANTISSA > max & MANTISSA;
    match rule {
        ExponentRule::Up => Ue8m0::from_exponent(e + above_largest_code as i32),
        ExponentRule::Floor => Ue8m0::from_exponent(e),
    }
}

#[inline(always)]
const fn biased_exponent(bits: u32) -> i32 {
    ((bits >> MANTISSA_BITS) & 0xFF) as i32
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
