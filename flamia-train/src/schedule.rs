//! The learning rate over the steps: linear warm-up, then half a cosine down to a floor.

use std::f64::consts::PI;

/// A learning-rate schedule. A pure function of the step, so that resuming needs no state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The learning rate at the end of the warm-up.
    pub peak: f64,
    /// Steps of warm-up; 0 starts at the peak.
    pub warmup: u64,
    /// Steps of the whole run, the warm-up included.
    pub steps: u64,
    /// The last step's learning rate, as a share of the peak.
    pub min_ratio: f64,
}

impl Schedule {
    /// The learning rate of optimiser step `step`, counted from 0.
    ///
    /// Step 0 already moves (`peak / warmup`), step `warmup - 1` is the first at the peak and step
    /// `steps - 1` the first at the floor, where it stays.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let decay_steps = self.steps.saturating_sub(self.warmup).max(1);
        let done = ((step - self.warmup + 1) as f64 / decay_steps as f64).min(1.0);
        let floor = self.peak * self.min_ratio;
        floor + (self.peak - floor) * 0.5 * (1.0 + (PI * done).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SCHEDULE: Schedule = Schedule {
        peak: 1e-3,
        warmup: 10,
        steps: 110,
        min_ratio: 0.1,
    };

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-15
    }

    #[test]
    fn has_its_landmarks_where_the_definition_puts_them() {
        assert!(close(SCHEDULE.lr(0), 1e-4));
        assert!(close(SCHEDULE.lr(4), 5e-4));
        assert!(close(SCHEDULE.lr(9), 1e-3));
        // Half-way down the cosine: the mean of peak and floor.
        assert!(close(SCHEDULE.lr(59), 5.5e-4));
        assert!(close(SCHEDULE.lr(109), 1e-4));
        assert!(close(SCHEDULE.lr(100_000), 1e-4));
    }

    #[test]
    fn without_warm_up_it_starts_near_the_peak() {
        let schedule = Schedule {
            warmup: 0,
            ..SCHEDULE
        };
        assert!(schedule.lr(0) < 1e-3 && schedule.lr(0) > 0.999e-3);
    }

    proptest! {
        #[test]
        fn rises_then_falls_and_stays_positive(
            warmup in 0u64..50, decay in 0u64..200, min_ratio in 0.0f64..=1.0,
        ) {
            let steps = warmup + decay;
            let schedule = Schedule { peak: 3e-4, warmup, steps, min_ratio };
            let rates: Vec<f64> = (0..steps + 5).map(|step| schedule.lr(step)).collect();
            let (up, down) = rates.split_at(warmup as usize);
            prop_assert!(up.is_sorted());
            prop_assert!(down.is_sorted_by(|a, b| a >= b));
            prop_assert!(rates.iter().all(|&lr| (0.0..=3e-4 + 1e-18).contains(&lr)));
        }
    }
}
