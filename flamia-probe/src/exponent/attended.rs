//! What the polynomial's clamp is there for, on attention as a whole.

use flamia_kernels::{Ablation, Exponential, Mask, Options, Path, Polynomial};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::Row;
use crate::attention::attend;
use crate::error::ProbeError;
use crate::metric::cosine;
use crate::problem::{Problem, Tensor};

const LENGTH: usize = 512;
const HEAD_DIM: usize = 128;

/// The output's cosine to that with exact exponentials, with the polynomial for every entry and with the
/// polynomial without its clamp, on scores that span `nats` within a row.
pub(super) fn rows(nats: f32, seed: u64) -> Result<[Row; 2], ProbeError> {
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
    let expected = attend(&problem, &exact)?;
    let row = |name, options, paper| -> Result<Row, ProbeError> {
        let found = attend(&problem, &options)?;
        Ok(Row {
            name,
            inputs: format!("scores over {nats} nats"),
            metric: "output cosine",
            value: cosine(&found.o, &expected.o),
            paper,
        })
    };
    Ok([
        row("polynomial 3", clamped, None)?,
        row("polynomial 3, unclamped", unclamped, Some(-0.012))?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_clamp_saves_a_wide_range() {
        let [clamped, unclamped] = rows(400.0, 0).unwrap();
        println!("{} clamped, {} unclamped", clamped.value, unclamped.value);
        assert!(clamped.value > 0.9999, "{clamped:?}");
        assert!(
            unclamped.value.is_nan() || unclamped.value < 0.5,
            "{unclamped:?}"
        );
        let [_, harmless] = rows(20.0, 0).unwrap();
        assert!(harmless.value > 0.9999, "{harmless:?}");
    }
}
