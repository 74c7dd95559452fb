//! Random numbers that depend on the seed alone: the same on every machine, device and thread count.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};

/// Independent draws from the standard normal distribution.
#[derive(Debug, Clone)]
pub struct Normals(ChaCha12Rng);

impl Normals {
    /// The stream that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha12Rng::seed_from_u64(seed))
    }

    /// The next `count` draws, each times `std`.
    pub fn draw(&mut self, count: usize, std: f64) -> Vec<f32> {
        // Scaled in f64 and rounded once, so that the last bit does not depend on the scale.
        StandardNormal
            .sample_iter(&mut self.0)
            .take(count)
            .map(|z: f64| (z * std) as f32)
            .collect()
    }
}

/// A seed that belongs to these four numbers, in this order, and tells nothing about the seeds of
/// others.
pub fn seed_of(numbers: [u64; 4]) -> u64 {
    let mut key = [0; 32];
    for (bytes, number) in key.chunks_exact_mut(8).zip(numbers) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    ChaCha12Rng::from_seed(key).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_asked_mean_and_spread() {
        let draws = Normals::new(7).draw(200_000, 0.02);
        let n = draws.len() as f64;
        let mean = draws.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = draws
            .iter()
            .map(|&x| (f64::from(x) - mean).powi(2))
            .sum::<f64>()
            / n;
        assert!(mean.abs() < 4.0 * 0.02 / n.sqrt(), "mean {mean}");
        assert!(
            (variance.sqrt() / 0.02 - 1.0).abs() < 0.01,
            "std {}",
            variance.sqrt()
        );
    }

    #[test]
    fn the_seed_alone_decides() {
        let a = Normals::new(1).draw(1000, 1.0);
        assert_eq!(a, Normals::new(1).draw(1000, 1.0));
        assert_ne!(a, Normals::new(2).draw(1000, 1.0));
        let mut in_two = Normals::new(1);
        let halves = [in_two.draw(300, 1.0), in_two.draw(700, 1.0)].concat();
        assert_eq!(a, halves);
    }
    #[test]
    fn seeds_differ_wherever_one_of_their_numbers_does() {
        let mut seeds = std::collections::BTreeSet::new();
        for i in 0..4096u64 {
            let numbers = [0, 3, 6, 9].map(|shift| i >> shift & 7);
            assert!(seeds.insert(seed_of(numbers)), "{numbers:?}");
            assert_eq!(seed_of(numbers), seed_of(numbers));
        }
        // Halves of the bits, on average, between neighbours: no seed is near another.
        let flips = |i: u64| (seed_of([i, 0, 0, 0]) ^ seed_of([i + 1, 0, 0, 0])).count_ones();
        let mean = f64::from((0..1000).map(flips).sum::<u32>()) / 1000.0;
        assert!((mean - 32.0).abs() < 1.0, "{mean}");
    }
}
