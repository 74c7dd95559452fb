//! Stochastic rounding: only the two neighbours, in the right proportion.

mod support;

use flamia_format::random::bits;
use flamia_format::{e2m1, e4m3};
use proptest::prelude::*;
use support::{e2m1_values, e4m3_values};

struct Format {
    /// Non-negative values, increasing.
    values: &'static [f32],
    round: fn(f32, u32) -> f32,
}

fn formats() -> [Format; 2] {
    [
        Format {
            values: &e2m1_values()[..8],
            round: e2m1::round_stochastic,
        },
        Format {
            values: &e4m3_values()[..0x7F],
            round: e4m3::round_stochastic,
        },
    ]
}

impl Format {
    /// The values next to a magnitude inside the range, and its place between them.
    fn neighbours(&self, magnitude: f32) -> (f32, f32, f64) {
        let above = self
            .values
            .partition_point(|&value| value <= magnitude)
            .min(self.values.len() - 1);
        let (lower, upper) = (self.values[above - 1], self.values[above]);
        let width = f64::from(upper) - f64::from(lower);
        let place = (f64::from(magnitude) - f64::from(lower)) / width;
        (lower, upper, place)
    }

    /// The first of the 2^23 ordered draws that does not round up stands at `x`'s place: that is
    /// the probability exactly, without sampling.
    fn check(&self, x: f32) {
        const DRAWS: f64 = (1 << 23) as f64;
        let (lower, upper, place) = self.neighbours(x.abs());
        let up = |draw: u32| {
            // The bits below the draw's do not matter.
            let rounded = (self.round)(x, draw << 9 | (x.to_bits() & 0x1FF));
            assert_eq!(rounded.is_sign_negative(), x.is_sign_negative());
            let rounded = rounded.abs();
            assert!(
                rounded == lower || rounded == upper,
                "{x:e} gave {rounded:e}, not {lower:e} or {upper:e}"
            );
            rounded == upper
        };
        let expected = (place * DRAWS - 0.5).ceil() as u32;
        if expected > 0 {
            assert!(up(0) && up(expected - 1), "{x:e}");
        }
        if expected < 1 << 23 {
            assert!(!up(expected) && !up((1 << 23) - 1), "{x:e}");
        }
    }
}

#[test]
fn the_values_of_the_format_are_unchanged() {
    for format in formats() {
        for &value in format.values {
            for random in [0, 1, 2, 0x8000_0000, u32::MAX] {
                for x in [value, -value] {
                    assert_eq!((format.round)(x, random).to_bits(), x.to_bits());
                }
            }
        }
    }
}

#[test]
fn what_is_outside_saturates_and_nan_stays() {
    for format in formats() {
        let max = *format.values.last().unwrap();
        for random in [0, 77, u32::MAX] {
            for x in [max + 1.0, max * 2.0, f32::MAX, f32::INFINITY] {
                assert_eq!((format.round)(x, random), max);
                assert_eq!((format.round)(-x, random), -max);
            }
            for nan in [f32::NAN, f32::from_bits(0xFFFF_FFFF)] {
                assert!((format.round)(nan, random).is_nan());
            }
        }
    }
}

proptest! {
    #[test]
    fn the_probability_is_the_place_between_two_neighbours(
        unit in -1f32..1.0, exponent in -40i32..4,
    ) {
        for format in formats() {
            let max = *format.values.last().unwrap();
            // All of the range, and with a magnitude that thins out towards zero.
            format.check(unit * max);
            format.check(unit * 2f32.powi(exponent).min(max));
        }
    }
}

/// The mean over the generator's own bits, within five standard deviations.
#[test]
fn the_mean_is_the_value() {
    const DRAWS: u64 = 100_000;
    for format in formats() {
        for (seed, x) in [0.1f32, 0.3, 0.9, 1.2, -1.7, 2.9, -3.1, 4.6, 5.9]
            .into_iter()
            .enumerate()
        {
            let sum: f64 = (0..DRAWS)
                .map(|counter| f64::from((format.round)(x, bits(seed as u64, counter))))
                .sum();
            let (lower, upper, place) = format.neighbours(x.abs());
            let deviation = f64::from(upper - lower) * (place * (1.0 - place)).sqrt();
            let off = sum / DRAWS as f64 - f64::from(x);
            assert!(
                off.abs() <= 5.0 * deviation / (DRAWS as f64).sqrt(),
                "{x}: {off:e}"
            );
            assert!(deviation > 0.0);
        }
    }
}
