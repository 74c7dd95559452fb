//! What a run has done since its numbers were last looked at, and how fast.

use flamia_sched::Mask;

use crate::batch::{MicroBatch, Packing};
use crate::curves::SPEED;
use crate::model::ModelShape;

/// Work and time of some steps.
#[derive(Debug, Clone, Default)]
pub struct Meter {
    /// Steps.
    pub steps: u64,
    /// Label tokens trained on.
    pub tokens: u64,
    /// How their rows were packed.
    pub packing: Packing,
    /// Floating-point operations of the model.
    pub flops: f64,
    /// Seconds of the steps, from their first row to the last result that was waited for.
    pub seconds: f64,
    /// Of `seconds`, waiting for rows and laying them out.
    pub data_seconds: f64,
}

impl Meter {
    /// Counts the micro-batches of one step in, and returns their operations.
    pub fn add(&mut self, batches: &[MicroBatch], shape: &ModelShape, mask: Mask) -> f64 {
        let of = |batch: &MicroBatch| {
            shape.training_flops(batch.label_tokens, batch.visible_pairs(mask))
        };
        let flops = batches.iter().map(of).sum();
        let tokens = batches.iter().map(|batch| batch.label_tokens).sum();
        self.count(tokens, flops);
        flops
    }

    /// Counts a step of so many label tokens and operations in.
    pub fn count(&mut self, tokens: u64, flops: f64) {
        self.steps += 1;
        self.tokens += tokens;
        self.flops += flops;
    }

    /// Its speed as curves; `peak_tflops` is what the device could do, if that is known.
    pub fn curves(&self, peak_tflops: Option<f64>) -> Vec<(&'static str, f64)> {
        let tflops = self.flops / self.seconds / 1e12;
        let mut curves = vec![
            (SPEED, self.tokens as f64 / self.seconds),
            ("train/model_tflops", tflops),
            (
                "data/seconds_per_step",
                self.data_seconds / self.steps as f64,
            ),
            ("data/documents_per_row", self.packing.documents_per_row()),
            ("data/padding_share", self.packing.padding_share()),
            ("data/longest_document", self.packing.longest as f64),
        ];
        curves.extend(peak_tflops.map(|peak| ("train/utilisation", tflops / peak)));
        curves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_products() {
        let shape = ModelShape {
            vocab: 11,
            dim: 8,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 6,
            ffn_dim: 12,
            rope_theta: 1e4,
            norm_eps: 1e-5,
            tied: true,
        };
        // q and o 8x24, k and v 8x12, three of 8x12; the head 11x8.
        let weights = 2 * (2 * 8 * 24 + 2 * 8 * 12 + 3 * 8 * 12) + 11 * 8;
        assert_eq!(shape.training_flops(10, 0), f64::from(6 * 10 * weights));
        // Scores and values: 2 operations for each of 4 heads of 6, in 2 layers, three times.
        let pairs = f64::from(2 * 2 * 4 * 6 * 2 * 3);
        let found = shape.training_flops(10, 7) - shape.training_flops(10, 0);
        assert_eq!(found, 7.0 * pairs);
    }

    #[test]
    fn speed_is_work_over_time() {
        let meter = Meter {
            steps: 4,
            tokens: 1000,
            packing: Packing::default(),
            flops: 3e12,
            seconds: 2.0,
            data_seconds: 1.0,
        };
        let curve = |peak, tag| {
            let curves = meter.curves(peak).into_iter();
            curves
                .filter(|(name, _)| *name == tag)
                .map(|(_, value)| value)
                .next()
        };
        assert_eq!(curve(None, SPEED), Some(500.0));
        assert_eq!(curve(None, "train/model_tflops"), Some(1.5));
        assert_eq!(curve(None, "train/utilisation"), None);
        assert_eq!(curve(Some(15.0), "train/utilisation"), Some(0.1));
        assert_eq!(curve(None, "data/seconds_per_step"), Some(0.25));
    }
}
