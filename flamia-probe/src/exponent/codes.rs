//! Codes of a 4-bit P without an exact exponential.

use flamia_format::{E2M1, Element, ExponentRule, block_exponent_of, nvfp4_round_in_place};
use flamia_kernels::cpu::exponential::mitchell_p;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::error::ProbeError;
use crate::problem::Problem;

const HEAD_DIM: usize = 128;
/// Keys that share a scale of P.
const GROUP: usize = 32;

/// Scores as a 4-bit P sees them: in powers of two, relative to the scale of their 32 keys, so that the
/// exact code is that of 2^z.
#[derive(Clone, Debug)]
pub struct Scores(pub Vec<f32>);

impl Scores {
    /// Those of a standard normal Q and K in NVFP4 without a mask, as the paper's 4-bit paths compute
    /// them; P's scales are powers of two, rounded up.
    ///
    /// # Errors
    /// More rows than a packed row can hold.
    pub fn gaussian(length: usize, seed: u64) -> Result<Self, ProbeError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut problem = Problem::gaussian(&[length], [1, 1, HEAD_DIM], &mut rng)?;
        nvfp4_round_in_place(&mut problem.q, HEAD_DIM);
        nvfp4_round_in_place(&mut problem.k, HEAD_DIM);
        let factor = std::f32::consts::LOG2_E / (HEAD_DIM as f32).sqrt();
        let rows = (0..length).into_par_iter().flat_map_iter(|i| {
            let q = problem.q_row(i, 0);
            let mut x: Vec<f32> = (0..length)
                .map(|j| {
                    problem
                        .k_row(j, 0)
                        .iter()
                        .zip(q)
                        .map(|(k, q)| k * q)
                        .sum::<f32>()
                        * factor
                })
                .collect();
            let max = largest(&x);
            for group in x.chunks_mut(GROUP) {
                let amax = (largest(group) - max).exp2();
                let scale = block_exponent_of(amax, Element::E2M1, ExponentRule::Up);
                let frame = max + scale.to_f32().log2();
                group.iter_mut().for_each(|x| *x -= frame);
            }
            x
        });
        Ok(Self(rows.collect()))
    }

    /// Evenly spread over the 8.6 powers of two from -6, where the code is 0 by far, to log2(6), the
    /// largest that a scale leaves.
    pub fn uniform() -> Self {
        const STEPS: u32 = 1 << 20;
        let (low, high) = (-6.0, 6f64.log2());
        let step = |i| low + (high - low) * (f64::from(i) + 0.5) / f64::from(STEPS);
        Self((0..STEPS).map(|i| step(i) as f32).collect())
    }

    /// The share of scores to which `classify` gives the code that exact rounding of 2^z gives.
    pub fn agreement(&self, classify: impl Fn(f32) -> u8 + Sync) -> f64 {
        let right = self
            .0
            .par_iter()
            .filter(|z| classify(**z) == exact_code(**z));
        right.count() as f64 / self.0.len() as f64
    }
}

fn largest(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The code of 2^z rounded to nearest.
pub fn exact_code(z: f32) -> u8 {
    E2M1::from_f32(z.exp2()).0
}

/// The code of Mitchell-P's 2^z rounded to nearest.
pub fn mitchell_code(z: f32) -> u8 {
    E2M1::from_f32(mitchell_p(z)).0
}

/// A classifier in the style of Direct-P: the code is `slope · z + offset`, rounded and clamped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine {
    /// Codes per power of two.
    pub slope: f32,
    /// The code of z = 0.
    pub offset: f32,
}

impl Affine {
    /// Two codes per power of two, through those of 0.5, 1, 2 and 4.
    pub const TWO_PER_OCTAVE: Self = Self {
        slope: 2.0,
        offset: 2.0,
    };

    /// The code it gives.
    pub fn code(&self, z: f32) -> u8 {
        self.slope
            .mul_add(z, self.offset)
            .round_ties_even()
            .clamp(0.0, 7.0) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_known_scores() {
        // Values -> codes of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
        for (value, code) in [
            (0.2f32, 0),
            (0.5, 1),
            (1.0, 2),
            (1.6, 3),
            (2.0, 4),
            (3.1, 5),
            (4.0, 6),
            (6.0, 7),
        ] {
            let z = value.log2();
            assert_eq!((exact_code(z), mitchell_code(z)), (code, code), "{value}");
        }
        assert_eq!((exact_code(-300.0), mitchell_code(-300.0)), (0, 0));
        let affine = Affine::TWO_PER_OCTAVE;
        for (z, code) in [
            (-5.0, 0),
            (-1.0, 0),
            (-0.5, 1),
            (0.0, 2),
            (1.0, 4),
            (2.0, 6),
            (9.0, 7),
        ] {
            assert_eq!(affine.code(z), code, "{z}");
        }
    }

    #[test]
    fn a_group_of_scores_fills_the_format() {
        let scores = Scores::gaussian(64, 1).unwrap();
        assert_eq!(scores.0.len(), 64 * 64);
        for group in scores.0.chunks(GROUP) {
            let largest = largest(group).exp2();
            assert!(
                largest > 3.0 * 0.9999 && largest < 6.0 * 1.0001,
                "{largest}"
            );
        }
    }

    /// The paper's 98.7 %, on the sweep. Where two thresholds differ can be added up: the classifiers
    /// disagree on 0.114 of 8.585 powers of two.
    #[test]
    fn mitchell_gives_nearly_every_code() {
        let agreement = Scores::uniform().agreement(mitchell_code);
        println!(
            "Mitchell-P agrees on {:.2} % of the sweep",
            100.0 * agreement
        );
        assert!((agreement - 0.987).abs() < 3e-3);
        assert!((agreement - (1.0 - 0.1141 / (6.0 + 6f64.log2()))).abs() < 1e-4);
    }

    /// The paper's 63.3 %, on attention scores.
    #[test]
    fn an_affine_classifier_gives_two_thirds() {
        let scores = Scores::gaussian(1024, 0).unwrap();
        let affine = scores.agreement(|z| Affine::TWO_PER_OCTAVE.code(z));
        let mitchell = scores.agreement(mitchell_code);
        println!(
            "affine {:.2} %, Mitchell-P {:.2} % of scores",
            100.0 * affine,
            100.0 * mitchell
        );
        assert!((affine - 0.633).abs() < 0.02);
        assert!(mitchell > 0.975);
    }
}
