//! E2M1, the 4-bit element format: 1 sign, 2 exponent bits and 1 mantissa bit.

use crate::rounding::Grid;

/// The OCP E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign, the code in the low nibble. There
/// is neither an infinity nor a NaN.
///
/// Equality compares bytes, so `0x0 != 0x8`. The high nibble of every code made here is zero, and
/// reading a code ignores it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct E2M1(pub u8);

const MIN_NORMAL: f32 = 1.0;
const MIN_SUBNORMAL: f32 = 0.5;
const SIGN: u8 = 0x8;
const MANTISSA_BITS: u32 = 1;

const F32_MANTISSA_BITS: u32 = 23;
/// Difference of the exponent biases, 127 - 1.
const REBIAS: u32 = 126;

impl E2M1 {
    /// The largest value.
    pub const MAX: f32 = 6.0;
    /// Positive zero.
    pub const ZERO: E2M1 = E2M1(0x0);

    /// Rounds to nearest, ties to the even code. Magnitudes past 6, infinities included, saturate
    /// to ±6.
    ///
    /// The format cannot express a NaN, and the OCP specification leaves its conversion open: here
    /// it saturates like the infinity of its sign, to a number as conspicuous as there is. The
    /// block quantisers never get here with one: they give its block a NaN scale.
    #[inline(always)]
    pub fn from_f32(x: f32) -> Self {
        let sign = ((x.to_bits() >> 28) as u8) & SIGN;
        let magnitude = round(x).abs();
        let code = if magnitude < MIN_NORMAL {
            (magnitude / MIN_SUBNORMAL) as u8
        } else {
            // A NaN fails the comparison.
            let magnitude = if magnitude < Self::MAX {
                magnitude
            } else {
                Self::MAX
            };
            let rebiased = magnitude.to_bits() - (REBIAS << F32_MANTISSA_BITS);
            (rebiased >> (F32_MANTISSA_BITS - MANTISSA_BITS)) as u8
        };
        E2M1(sign | code)
    }

    /// The exact value.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        let code = u32::from(self.0 & 0x7);
        let magnitude = if code >> MANTISSA_BITS == 0 {
            code as f32 * MIN_SUBNORMAL
        } else {
            let widened = code << (F32_MANTISSA_BITS - MANTISSA_BITS);
            f32::from_bits(widened + (REBIAS << F32_MANTISSA_BITS))
        };
        f32::from_bits(magnitude.to_bits() | (u32::from(self.0 & SIGN) << 28))
    }
}

const GRID: Grid = Grid {
    max: E2M1::MAX,
    min_normal: MIN_NORMAL,
    mantissa_bits: MANTISSA_BITS,
};

/// What `E2M1::from_f32(x).to_f32()` gives, but NaN stays NaN: nearest, ties to the even code,
/// saturating at ±6, the sign of zero kept.
///
/// No branch and no table, so that a loop over it becomes vector code.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    GRID.nearest(x)
}

/// The E2M1 value at or next to `x`, chosen by `random`'s uniform bits so that the mean is `x`.
///
/// Inside ±6: the neighbour away from zero with a probability equal to `x`'s place between the two,
/// to 2^-24; E2M1's own values are unchanged. Outside, infinities included, ±6. The sign of zero is
/// kept, NaN stays NaN. No branch and no table.
#[inline(always)]
pub fn round_stochastic(x: f32, random: u32) -> f32 {
    GRID.stochastic(x, random)
}
