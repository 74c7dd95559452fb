//! The online softmax of one row, in base 2.

use std::ops::Range;

use super::real::{Real, fold_lanes};

/// Lanes of a row's maximum and sum; part of the definition of the sum's order.
const LANES: usize = 16;

/// Sums of a row's probabilities, 2^(x - max + c) each, relative to one maximum.
#[derive(Clone, Copy)]
pub(crate) struct Sums<R> {
    /// As they are.
    pub exact: R,
    /// Times the scales of V that P·V reads folded into them, before they are rounded.
    pub folded: R,
    /// The same after they were rounded, as P·V reads them. 0 where O is not divided by it, or if there
    /// is none but zeros.
    pub rounded: R,
}

impl<R: Real> Sums<R> {
    /// Sums for an O that is divided by `exact`.
    #[inline(always)]
    pub fn unrounded(exact: R) -> Self {
        Self {
            exact,
            folded: R::ZERO,
            rounded: R::ZERO,
        }
    }
}

/// Running state of a row.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxRow<R> {
    /// What exponentials are relative to; -∞ before the first visible key.
    pub max: R,
    sums: Sums<R>,
}

impl<R: Real> SoftmaxRow<R> {
    pub const START: Self = Self {
        max: R::NEG_INFINITY,
        sums: Sums {
            exact: R::ZERO,
            folded: R::ZERO,
            rounded: R::ZERO,
        },
    };

    /// Turns products into base-2 scores, masks keys that are not `visible` with -∞, and returns the
    /// largest score. NaN is left to the exponential.
    #[inline(always)]
    pub fn scale_scores(&self, s: &mut [R], visible: &Range<usize>, scale: R) -> R {
        for s in s.iter_mut() {
            *s *= scale;
        }
        fill_outside(s, visible, R::NEG_INFINITY);
        largest(s)
    }

    /// Makes `max` the reference, and rescales what was accumulated relative to the last one.
    #[inline(always)]
    pub fn rescale(&mut self, max: R, o: &mut [R]) {
        let factor = (self.max - max).exp2();
        self.max = max;
        let Sums {
            exact,
            folded,
            rounded,
        } = &mut self.sums;
        for sum in [exact, folded, rounded] {
            *sum *= factor;
        }
        for o in o {
            *o *= factor;
        }
    }

    #[inline(always)]
    pub fn add(&mut self, sums: Sums<R>) {
        self.sums.exact += sums.exact;
        self.sums.folded += sums.folded;
        self.sums.rounded += sums.rounded;
    }

    /// Normalises the output of the row and returns its natural log-sum-exp. A row that saw no key
    /// is zero, with +∞.
    ///
    /// With a sum of what was rounded, O is the mean of V's codes under the rounded probabilities, whose
    /// weights sum to 1 exactly, times the mean of V's folded scales under the unrounded ones.
    #[inline(always)]
    pub fn finish(&self, o: &mut [R], c: R) -> R {
        let Sums {
            exact,
            folded,
            rounded,
        } = self.sums;
        if exact == R::ZERO {
            o.fill(R::ZERO);
            return R::INFINITY;
        }
        let (divisor, mean_fold) = if rounded == R::ZERO {
            (exact, R::from_f64(1.0))
        } else {
            (rounded, folded / exact)
        };
        for o in o {
            *o = *o / divisor * mean_fold;
        }
        (self.max - c + exact.log2()) * R::from_f64(std::f64::consts::LN_2)
    }
}

/// Sets what a row does not see.
#[inline(always)]
pub(crate) fn fill_outside<R: Real>(values: &mut [R], visible: &Range<usize>, value: R) {
    values[..visible.start].fill(value);
    values[visible.end..].fill(value);
}

/// Makes scores relative to `max`, with the power of two of P.
#[inline(always)]
pub(crate) fn relative<R: Real>(x: &mut [R], max: R, c: R) {
    for x in x {
        *x = (*x - max) + c;
    }
}

/// The sum of whole lanes.
#[inline(always)]
pub(crate) fn lane_total<R: Real>(values: &[R]) -> R {
    let mut lanes = [R::ZERO; LANES];
    for values in values.chunks_exact(LANES) {
        for (value, lane) in values.iter().zip(&mut lanes) {
            *lane += *value;
        }
    }
    fold_lanes(&mut lanes)
}

/// The largest value, NaN left out; -∞ if there is none.
#[inline(always)]
pub(crate) fn largest<R: Real>(values: &[R]) -> R {
    let mut lanes = [R::NEG_INFINITY; LANES];
    for values in values.chunks_exact(LANES) {
        for (value, lane) in values.iter().zip(&mut lanes) {
            *lane = value.max(*lane);
        }
    }
    lanes
        .into_iter()
        .fold(R::NEG_INFINITY, |largest, lane| lane.max(largest))
}
