//! A level that the next value of a curve seldom passes, from its last ones.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// The least deviation as a share of the median.
const LEAST_DEVIATION: f64 = 1e-3;

/// The last values of a curve, all finite.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Recent(VecDeque<f64>);

/// What is usual for a curve, and where a jump begins.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Level {
    /// The median.
    pub median: f64,
    /// The median absolute deviation from it, at least a thousandth of it.
    pub deviation: f64,
    /// A value above this is a jump.
    pub threshold: f64,
}

impl Recent {
    /// Takes in a finite `value`, and forgets what is further back than `window` values.
    pub fn push(&mut self, value: f64, window: usize) {
        self.0.push_back(value);
        while self.0.len() > window {
            self.0.pop_front();
        }
    }

    /// The level of the last `window` values, with jumps from `factor` deviations on. `None` as long as
    /// there are fewer.
    pub fn level(&self, window: usize, factor: f64) -> Option<Level> {
        let unseen = self.0.len().checked_sub(window)?;
        let mut values: Vec<f64> = self.0.iter().skip(unseen).copied().collect();
        let median = median(&mut values)?;
        for value in &mut values {
            *value = (*value - median).abs();
        }
        let deviation = self::median(&mut values)?.max(LEAST_DEVIATION * median.abs());
        Some(Level {
            median,
            deviation,
            threshold: median + factor * deviation,
        })
    }
}

/// The median of `values`, which are put in order; of an even number, the mean of the middle two.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    match values.len().is_multiple_of(2) {
        true => Some((values[values.len() / 2 - 1] + upper) / 2.0),
        false => Some(upper),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The median by ranks: as many values below as above, without sorting.
    fn by_ranks(values: &[f64]) -> f64 {
        let at_rank = |rank: usize| {
            let holds = |x: &&f64| {
                let below = values.iter().filter(|y| y < x).count();
                let same = values.iter().filter(|y| y == x).count();
                (below..below + same).contains(&rank)
            };
            *values.iter().find(holds).unwrap()
        };
        let n = values.len();
        (at_rank((n - 1) / 2) + at_rank(n / 2)) / 2.0
    }

    proptest! {
        #[test]
        fn jumps_are_those_of_a_search_by_brute_force(
            // Few distinct values, so that ties occur.
            curve in prop::collection::vec((0..40i32).prop_map(|x| 1.0 + f64::from(x) / 8.0), 1..80),
            window in 8..20usize,
            factor in 0.5..12.0f64,
        ) {
            let mut recent = Recent::default();
            for (i, &value) in curve.iter().enumerate() {
                let expected = (i >= window).then(|| {
                    let before = &curve[i - window..i];
                    let median = by_ranks(before);
                    let off: Vec<f64> = before.iter().map(|x| (x - median).abs()).collect();
                    median + factor * by_ranks(&off).max(median / 1000.0)
                });
                let level = recent.level(window, factor);
                prop_assert_eq!(level.map(|level| level.threshold), expected, "step {}", i);
                recent.push(value, window);
            }
        }
    }

    #[test]
    fn a_flat_curve_has_some_width_and_one_outlier_moves_nothing() {
        let mut recent = Recent::default();
        for _ in 0..8 {
            assert_eq!(recent.level(8, 10.0), None);
            recent.push(2.0, 8);
        }
        let flat = recent.level(8, 10.0).unwrap();
        assert_eq!((flat.median, flat.deviation), (2.0, 0.002));
        assert!((flat.threshold - 2.02).abs() < 1e-12);
        recent.push(1e9, 8);
        assert_eq!(recent.level(8, 10.0), Some(flat));
    }

    #[test]
    fn a_window_made_shorter_or_longer_takes_what_there_is() {
        let mut recent = Recent::default();
        for value in [9.0, 9.0, 9.0, 1.0, 2.0, 3.0] {
            recent.push(value, 6);
        }
        assert_eq!(recent.level(3, 1.0).unwrap().median, 2.0);
        assert_eq!(recent.level(7, 1.0), None);
    }
}
