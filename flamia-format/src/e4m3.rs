//! E4M3, the 8-bit element format: 1 sign, 4 exponent and 3 mantissa bits.

use crate::rounding::Grid;

/// The OCP "FN" variant of E4M3: bias 7, no infinity, NaN is `0x7F` and `0xFF`, the largest value
/// is 448, the smallest normal 2^-6, the smallest subnormal 2^-9.
///
/// Equality compares codes, so `NAN == NAN` and `0x00 != 0x80`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct E4M3(pub u8);

const MIN_NORMAL: f32 = 1.0 / 64.0;
const MIN_SUBNORMAL: f32 = 1.0 / 512.0;

const F32_SIGN: u32 = 0x8000_0000;
const F32_MANTISSA_BITS: u32 = 23;
const MANTISSA_BITS: u32 = 3;
/// Difference of the exponent biases, 127 - 7.
const REBIAS: u32 = 120;

impl E4M3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;
    /// Exponent of the smallest normal value, 2^-6.
    pub const MIN_NORMAL_EXP: i32 = -6;
    /// Exponent of the smallest subnormal value, 2^-9.
    pub const MIN_SUBNORMAL_EXP: i32 = -9;
    /// Positive zero.
    pub const ZERO: E4M3 = E4M3(0x00);
    /// The positive NaN.
    pub const NAN: E4M3 = E4M3(0x7F);

    /// Rounds to nearest, ties to even. Magnitudes past 448, infinities included, saturate to ±448;
    /// a NaN gives the NaN of its sign.
    ///
    /// Infinity saturates because a code alone cannot express it. The block quantisers never get
    /// here with one: they give a block that holds an infinity a NaN scale.
    #[inline(always)]
    pub fn from_f32(x: f32) -> Self {
        let sign = ((x.to_bits() & F32_SIGN) >> 24) as u8;
        let magnitude = round(x).abs();
        let code = if magnitude.is_nan() {
            Self::NAN.0
        } else if magnitude < MIN_NORMAL {
            (magnitude / MIN_SUBNORMAL) as u8
        } else {
            let rebiased = magnitude.to_bits() - (REBIAS << F32_MANTISSA_BITS);
            (rebiased >> (F32_MANTISSA_BITS - MANTISSA_BITS)) as u8
        };
        E4M3(sign | code)
    }

    /// The exact value.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        let code = u32::from(self.0 & 0x7F);
        let magnitude = if self.is_nan() {
            f32::NAN
        } else if code >> MANTISSA_BITS == 0 {
            code as f32 * MIN_SUBNORMAL
        } else {
            let widened = code << (F32_MANTISSA_BITS - MANTISSA_BITS);
            f32::from_bits(widened + (REBIAS << F32_MANTISSA_BITS))
        };
        f32::from_bits(magnitude.to_bits() | (u32::from(self.0 & 0x80) << 24))
    }

    /// Whether this is one of the two NaN codes.
    #[inline(always)]
    pub fn is_nan(self) -> bool {
        self.0 & 0x7F == Self::NAN.0
    }
}

const GRID: Grid = Grid {
    max: E4M3::MAX,
    min_normal: MIN_NORMAL,
    mantissa_bits: MANTISSA_BITS,
};

/// What `E4M3::from_f32(x).to_f32()` gives, without the detour through a code: nearest, ties to
/// even, saturating at ±448, the sign of zero kept, NaN stays NaN.
///
/// No branch and no table, so that a loop over it becomes vector code.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    GRID.nearest(x)
}

/// The E4M3 value at or next to `x`, chosen by `random`'s uniform bits so that the mean is `x`.
///
/// Inside ±448: the neighbour away from zero with a probability equal to `x`'s place between the
/// two, to 2^-24; E4M3's own values are unchanged. Outside, infinities included, ±448. The sign of
/// zero is kept, NaN stays NaN. No branch and no table.
#[inline(always)]
pub fn round_stochastic(x: f32, random: u32) -> f32 {
    GRID.stochastic(x, random)
}
