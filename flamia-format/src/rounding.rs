//! Rounding an `f32` to a format with few mantissa bits, without a branch or a table.
//!
//! A loop over these functions becomes vector code: they are the hot loop of the CPU reference.

const SIGN: u32 = 0x8000_0000;
const EXPONENT: u32 = 0x7F80_0000;
const MANTISSA_BITS: u32 = 23;

/// The values of an element format: `mantissa_bits` stored mantissa bits in every binade from
/// `min_normal` up, the same step below it, nothing above `max`.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub max: f32,
    pub min_normal: f32,
    pub mantissa_bits: u32,
}

impl Grid {
    /// The nearest value, ties to even, saturating; the sign of zero kept, NaN stays NaN.
    #[inline(always)]
    pub fn nearest(self, x: f32) -> f32 {
        let clamped = self.clamped_magnitude(x);
        let shifter = self.shifter(self.binade(clamped));
        with_sign_of(x, (clamped + shifter) - shifter)
    }

    /// The value at or next to `x`: of two neighbours the one away from zero with a probability
    /// equal to `x`'s place between them, `random` being uniform. Saturates, NaN stays NaN.
    ///
    /// The upper 23 bits of `random` decide. The probability is exact unless `x` is below the
    /// smallest subnormal value, and off by at most 2^-24 there.
    #[inline(always)]
    pub fn stochastic(self, x: f32, random: u32) -> f32 {
        let clamped = self.clamped_magnitude(x);
        let binade = self.binade(clamped);
        let shifter = self.shifter(binade);
        let nearest = (clamped + shifter) - shifter;
        let step = binade * self.step_of_one();
        let lower = if nearest > clamped {
            nearest - step
        } else {
            nearest
        };
        let up = if uniform(random) * step < clamped - lower {
            step
        } else {
            0.0
        };
        with_sign_of(x, lower + up)
    }

    /// Comparisons here and in `binade` are written so that a NaN is kept and each is one min or
    /// max instruction.
    #[inline(always)]
    fn clamped_magnitude(self, x: f32) -> f32 {
        let magnitude = f32::from_bits(x.to_bits() & !SIGN);
        if self.max < magnitude {
            self.max
        } else {
            magnitude
        }
    }

    /// The lowest value of the binade; below the smallest normal value the steps are as wide as
    /// just above it.
    #[inline(always)]
    fn binade(self, magnitude: f32) -> f32 {
        let binade = f32::from_bits(magnitude.to_bits() & EXPONENT);
        if self.min_normal < binade {
            binade
        } else {
            self.min_normal
        }
    }

    /// In a sum with this float the last mantissa bit is worth one step of the binade, so that the
    /// addition itself rounds, to nearest even. (For a NaN the bits run into the sign: still
    /// finite, and the NaN survives the sum.)
    #[inline(always)]
    fn shifter(self, binade: f32) -> f32 {
        let to_f32_ulp = (MANTISSA_BITS - self.mantissa_bits) << MANTISSA_BITS;
        f32::from_bits(binade.to_bits().wrapping_add(to_f32_ulp))
    }

    /// The step of the binade that begins at 1.
    #[inline(always)]
    fn step_of_one(self) -> f32 {
        1.0 / (1u32 << self.mantissa_bits) as f32
    }
}

#[inline(always)]
fn with_sign_of(x: f32, magnitude: f32) -> f32 {
    f32::from_bits(magnitude.to_bits() | (x.to_bits() & SIGN))
}

/// The middle of one of 2^23 equal parts of 0..1: never 0, so that a value of the format stays, and
/// exact, so that a multiple of 2^-23 is above just that share of them.
#[inline(always)]
fn uniform(random: u32) -> f32 {
    const HALF_PART: f32 = 1.0 / (1u32 << (MANTISSA_BITS + 1)) as f32;
    let in_1_to_2 = f32::from_bits(1f32.to_bits() | random >> (32 - MANTISSA_BITS));
    in_1_to_2 - (1.0 - HALF_PART)
}
