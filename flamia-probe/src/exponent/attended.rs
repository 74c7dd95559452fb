//! What the polynomial's clamp is there for, on attention as a whole.

use flamia_kernels::{Ablation, Exponential, Mask, Options, Path, Polynomial};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::Row;
use crate::attention::attend;
use crate::error::ProbeError;
use crate::metric::{cosine, largest};
use crate::problem::{Problem, Tensor};

const LENGTH: usize = 512;
const HEAD_DIM: usize = 128;

/// The output against that with exact exponentials, with the polynomial for every entry and with the
/// polynomial without its clamp, on scores that span `nats` within a row.
pub(super) fn rows(nats: f32, seed: u64) -> Result<Vec<Row>, ProbeError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut problem = Problem::gaussian(&[LENGTH], [1, 1, HEAD_DIM], &mut rng)?;
    // Scores are standard normal in nats, and 512 of them span about six standard deviations.
    problem.scale(Tensor::Q, |_, _, _| nats / 6.0);
    let exact = Options::new(Path::Mxfp8, Mask::Causal);
    let clamped = Options {
        exponential: Exponential::Polynomial,
        polynomial: Polynomial {
            degree: 3,
            eighths: 8,
        },
        ..exact
    };
    let unclamped = Options {
        ablate: Some(Ablation::UnclampedPolynomial),
        ..clamped
    };
    let expected = attend(&problem, &exact)?.o;
    let mut rows = Vec::new();
    for (name, options, paper) in [
        ("polynomial 3", clamped, None),
        ("polynomial 3, unclamped", unclamped, Some(-0.012)),
    ] {
        let found = attend(&problem, &options)?.o;
        let mut row = |metric, value, paper| {
            rows.push(Row {
                name,
                inputs: format!("scores over {nats} nats"),
                metric,
                value,
                paper,
            });
        };
        row("output cosine", cosine(&found, &expected), paper);
        row("wrong output elements", wrong(&found, &expected), None);
    }
    Ok(rows)
}

/// The share of elements that are off by more than a hundredth of the largest, or no number.
fn wrong(found: &[f64], expected: &[f64]) -> f64 {
    let slack = largest(expected.iter().copied()) / 100.0;
    let off = |(a, b): &(&f64, &f64)| {
        let difference = (*a - *b).abs();
        difference > slack || difference.is_nan()
    };
    found.iter().zip(expected).filter(off).count() as f64 / expected.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_clamp_saves_a_wide_range() {
        let values = |nats| -> Vec<f64> {
            let rows = rows(nats, 0).unwrap();
            rows.iter().map(|row| row.value).collect()
        };
        let wide = values(400.0);
        let [cosine, wrong, broken_cosine, broken] = wide[..] else {
            panic!("two figures with and without the clamp");
        };
        println!("clamped {cosine} {wrong}, unclamped {broken_cosine} {broken}");
        assert!(cosine > 0.9999 && wrong == 0.0);
        assert!(broken_cosine.is_nan() || broken_cosine < 0.5);
        assert!(broken > 0.5);
        // Where nothing wraps there is nothing to clamp.
        let narrow = values(20.0);
        assert!(narrow[2] > 0.9999 && narrow[3] < 1e-3, "{narrow:?}");
    }
}
