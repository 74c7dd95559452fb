//! UE8M0, the 8-bit power-of-two scale.

use crate::exponent::pow2;

/// A scale 2^(b - 127), `b` the stored byte; 255 is NaN. There is no zero and no sign.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ue8m0(pub u8);

impl Ue8m0 {
    /// Exponent of the smallest scale.
    pub const MIN_EXPONENT: i32 = -127;
    /// Exponent of the largest scale.
    pub const MAX_EXPONENT: i32 = 127;
    /// The scale of a block that holds a NaN or an infinity.
    pub const NAN: Ue8m0 = Ue8m0(255);
    /// The scale of a block of zeros, 2^-127. Also what the smallest non-zero blocks have, so it
    /// does not tell by itself that a block is zero.
    pub const ZERO_BLOCK: Ue8m0 = Ue8m0(0);

    /// The scale 2^`e`, `e` clamped to -127..=127.
    #[inline(always)]
    pub const fn from_exponent(e: i32) -> Self {
        if e < Self::MIN_EXPONENT {
            Ue8m0(0)
        } else if e > Self::MAX_EXPONENT {
            Ue8m0(254)
        } else {
            Ue8m0((e - Self::MIN_EXPONENT) as u8)
        }
    }

    /// The exponent `e` of 2^e, `None` for NaN.
    #[inline(always)]
    pub const fn exponent(self) -> Option<i32> {
        if self.is_nan() {
            None
        } else {
            Some(self.0 as i32 + Self::MIN_EXPONENT)
        }
    }

    /// The exact scale; byte 0 is the subnormal 2^-127.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        match self.exponent() {
            Some(e) => pow2(e),
            None => f32::NAN,
        }
    }

    /// The exact inverse, 2^-e. It exists for every scale, that of 2^127 being the subnormal 2^-127.
    #[inline(always)]
    pub const fn recip_f32(self) -> f32 {
        match self.exponent() {
            Some(e) => pow2(-e),
            None => f32::NAN,
        }
    }

    /// Whether this is the NaN scale.
    #[inline(always)]
    pub const fn is_nan(self) -> bool {
        self.0 == Self::NAN.0
    }
}
