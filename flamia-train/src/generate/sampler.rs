//! Which token comes next.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0 takes the likeliest token.
    pub temperature: f64,
    /// The likeliest tokens among which is chosen; none for all.
    pub top_k: Option<usize>,
    /// The share of the probability among whose likeliest tokens is chosen; none for all of it.
    pub top_p: Option<f64>,
    /// The seed of the choices.
    pub seed: u64,
}

/// Chooses token after token.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    never: Vec<u32>,
    rng: ChaCha12Rng,
}

impl Sampler {
    /// A sampler that chooses none of `never`.
    pub fn new(sampling: &Sampling, never: &[u32]) -> Self {
        Self {
            sampling: *sampling,
            never: never.to_vec(),
            rng: ChaCha12Rng::seed_from_u64(sampling.seed),
        }
    }

    /// A token for these logits, one for each id; of equal ones the first is the likeliest. None if no
    /// logit that may be chosen is a number.
    pub fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let mut ranked: Vec<(u32, f64)> = (0..)
            .zip(logits)
            .filter(|(id, logit)| logit.is_finite() && !self.never.contains(id))
            .map(|(id, &logit)| (id, logit.into()))
            .collect();
        let &(likeliest, most) = ranked
            .iter()
            .min_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)))?;
        let Sampling {
            temperature,
            top_k,
            top_p,
            ..
        } = self.sampling;
        if temperature == 0.0 {
            return Some(likeliest);
        }
        if top_k.is_some() || top_p.is_some() {
            ranked.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        }
        ranked.truncate(top_k.unwrap_or(usize::MAX));
        for (_, weight) in &mut ranked {
            *weight = ((*weight - most) / temperature).exp();
        }
        if let Some(share) = top_p {
            keep_share(&mut ranked, share);
        }
        self.draw(&ranked)
    }

    /// One of the weighted ids.
    fn draw(&mut self, weighted: &[(u32, f64)]) -> Option<u32> {
        let total: f64 = weighted.iter().map(|(_, weight)| weight).sum();
        // 53 random bits: a number from 0 up to, but not, 1.
        let mut left = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for &(id, weight) in weighted {
            left -= weight;
            if left < 0.0 {
                return Some(id);
            }
        }
        // Rounding may leave a little of the sum.
        weighted
            .iter()
            .rev()
            .find(|(_, weight)| *weight > 0.0)
            .map(|(id, _)| *id)
    }
}

/// Keeps the first of the ranked weights that reach `share` of their sum together.
fn keep_share(ranked: &mut Vec<(u32, f64)>, share: f64) {
    let total: f64 = ranked.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    let reached = ranked.iter().position(|(_, weight)| {
        sum += weight;
        sum >= share * total
    });
    if let Some(last) = reached {
        ranked.truncate(last + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling {
        temperature: 1.0,
        top_k: None,
        top_p: None,
        seed: 5,
    };

    /// Shares of 20,000 choices with these probabilities.
    fn shares(probabilities: [f32; 5], sampling: Sampling, never: &[u32]) -> [f64; 5] {
        const DRAWS: usize = 20_000;
        let mut sampler = Sampler::new(&sampling, never);
        let logits = probabilities.map(|p| p.ln() + 3.0);
        let mut counts = [0.0; 5];
        for _ in 0..DRAWS {
            counts[sampler.choose(&logits).unwrap() as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    #[test]
    fn choices_have_the_asked_probabilities() {
        let p = [0.1, 0.4, 0.05, 0.25, 0.2];
        for (sampling, never, expected) in [
            (PLAIN, &[][..], [0.1, 0.4, 0.05, 0.25, 0.2]),
            (
                PLAIN,
                &[1],
                [0.1 / 0.6, 0.0, 0.05 / 0.6, 0.25 / 0.6, 0.2 / 0.6],
            ),
            // Probabilities squared: their sum is 0.275.
            (
                Sampling {
                    temperature: 0.5,
                    ..PLAIN
                },
                &[],
                [0.01, 0.16, 0.0025, 0.0625, 0.04].map(|p| p / 0.275),
            ),
            (
                Sampling {
                    top_k: Some(2),
                    ..PLAIN
                },
                &[],
                [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0],
            ),
            // 0.4 + 0.25 falls short of 0.7, with 0.2 it is reached.
            (
                Sampling {
                    top_p: Some(0.7),
                    ..PLAIN
                },
                &[],
                [0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85],
            ),
            // Of the two that are left, 0.4 has more than 0.6 of the probability.
            (
                Sampling {
                    top_k: Some(2),
                    top_p: Some(0.6),
                    ..PLAIN
                },
                &[],
                [0.0, 1.0, 0.0, 0.0, 0.0],
            ),
            (
                Sampling {
                    temperature: 0.0,
                    ..PLAIN
                },
                &[],
                [0.0, 1.0, 0.0, 0.0, 0.0],
            ),
            (
                Sampling {
                    temperature: 1e-300,
                    ..PLAIN
                },
                &[],
                [0.0, 1.0, 0.0, 0.0, 0.0],
            ),
        ] {
            let found = shares(p, sampling, never);
            for (found, expected) in found.into_iter().zip(expected) {
                // Four standard deviations of a share of 20,000.
                assert!(
                    (found - expected).abs() < 0.0142,
                    "{sampling:?} {found} {expected}"
                );
                assert_eq!(found == 0.0, expected == 0.0, "{sampling:?}");
            }
        }
    }

    #[test]
    fn the_seed_decides() {
        let choices = |seed| {
            let mut sampler = Sampler::new(&Sampling { seed, ..PLAIN }, &[]);
            (0..100)
                .map(|_| sampler.choose(&[0.0; 50]).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(choices(1), choices(1));
        assert_ne!(choices(1), choices(2));
    }

    #[test]
    fn what_is_no_number_is_not_chosen() {
        let mut greedy = Sampler::new(
            &Sampling {
                temperature: 0.0,
                ..PLAIN
            },
            &[2],
        );
        assert_eq!(greedy.choose(&[f32::NAN, 1.0, 9.0, 1.0]), Some(1));
        assert_eq!(greedy.choose(&[f32::NAN, f32::NAN, 9.0]), None);
    }
}
