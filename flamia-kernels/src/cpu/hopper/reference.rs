//! Running power-of-two references of dS.

use flamia_format::exponent::{ExponentRule, block_exponent, pow2};

/// How far under its highest value a reference may fall: the accumulator is rescaled with it, and
/// what lies further down is under FP32's precision anyway.
const MAX_DESCENT: i32 = 64;

/// The exponent that one accumulator row's dS operand is divided by before it is rounded.
///
/// Raised when a tile's largest entry would pass the largest code, lowered when it falls under
/// 2^-hysteresis of it. Starts at the first tile that is not all zero.
#[derive(Clone, Copy, Default)]
pub(super) struct Reference {
    exponent: Option<i32>,
    highest: i32,
}

impl Reference {
    /// Takes the largest magnitude of the next tile into account and returns the exact factor for
    /// what has been accumulated, 1 if the reference stays.
    #[inline(always)]
    pub fn update(&mut self, amax: f32, hysteresis: i32) -> f32 {
        let Some(needed) = block_exponent(amax, ExponentRule::Up).exponent() else {
            return 1.0;
        };
        if amax == 0.0 {
            return 1.0;
        }
        let Some(current) = self.exponent else {
            *self = Self {
                exponent: Some(needed),
                highest: needed,
            };
            return 1.0;
        };
        let next = if needed > current {
            needed
        } else if needed <= current - hysteresis {
            needed.max(self.highest - MAX_DESCENT)
        } else {
            current
        };
        *self = Self {
            exponent: Some(next),
            highest: self.highest.max(next),
        };
        if next == current {
            1.0
        } else {
            pow2(current - next)
        }
    }

    /// What to multiply entries with before they are rounded.
    #[inline(always)]
    pub fn down(&self) -> f32 {
        self.exponent.map_or(0.0, |e| pow2(-e))
    }

    /// What to multiply the accumulated row with in the end.
    #[inline(always)]
    pub fn up(&self) -> f32 {
        self.exponent.map_or(0.0, pow2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_largest_entry_both_ways() {
        let mut reference = Reference::default();
        assert_eq!((reference.update(0.0, 3), reference.down()), (1.0, 0.0));
        assert_eq!((reference.update(448.0, 3), reference.up()), (1.0, 1.0));
        // Up at once, by as much as needed.
        assert_eq!((reference.update(449.0, 3), reference.up()), (0.5, 2.0));
        // Down only from 2^-3 on: 448 / 4 needs exponent -2 + 1.
        assert_eq!(
            (reference.update(448.0 / 2.0, 3), reference.up()),
            (1.0, 2.0)
        );
        assert_eq!(
            (reference.update(448.0 / 4.0, 3), reference.up()),
            (8.0, 0.25)
        );
        // NaN changes nothing: it poisons the entries themselves.
        assert_eq!((reference.update(f32::NAN, 3), reference.up()), (1.0, 0.25));
        // Never so far down that the accumulator could overflow.
        assert_eq!(reference.update(1e-38, 3), pow2(-2 - (1 - MAX_DESCENT)));
    }
}
