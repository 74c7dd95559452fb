//! The counter-based generator against its definition stepped state by state, and its statistics.

mod support;

use flamia_format::random::bits;

const DRAWS: u64 = 1 << 16;

/// The seeds that people use.
const SEEDS: [u64; 6] = [0, 1, 2, 42, 1 << 32, u64::MAX];

#[test]
fn bits_equal_splitmix64() {
    let table = include_str!("tables/random_bits.txt");
    let mut checked = 0;
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<u64> = line
            .split(' ')
            .map(|word| u64::from_str_radix(word, 16).unwrap())
            .collect();
        assert_eq!(u64::from(bits(words[0], words[1])), words[2], "{line}");
        checked += 1;
    }
    assert_eq!(checked, 96);
}

/// Whether a share of heads among `flips` fair coins is within five standard deviations.
fn fair(heads: u64, flips: u64) -> bool {
    (heads as f64 - flips as f64 / 2.0).abs() <= 2.5 * (flips as f64).sqrt()
}

#[test]
fn every_bit_is_balanced() {
    for seed in SEEDS {
        for bit in 0..32 {
            let ones = (0..DRAWS)
                .filter(|&c| bits(seed, c) >> bit & 1 == 1)
                .count() as u64;
            assert!(fair(ones, DRAWS), "seed {seed}, bit {bit}: {ones}");
        }
    }
}

/// Bits that stay the same from `a` to `b`, whatever shift would line them up.
fn assert_unrelated(what: &str, a: impl Fn(u64) -> u32, b: impl Fn(u64) -> u32) {
    for rotation in 0..32 {
        let equal: u64 = (0..DRAWS)
            .map(|c| u64::from((a(c) ^ b(c).rotate_left(rotation)).count_zeros()))
            .sum();
        assert!(
            fair(equal, 32 * DRAWS),
            "{what}, rotated {rotation}: {equal}"
        );
    }
}

/// Counters that a tile's loops produce: neighbours in a row, in a column, in another head.
#[test]
fn neighbouring_counters_are_unrelated() {
    for seed in SEEDS {
        for distance in [1, 2, 64, 128, 4096, 1 << 32] {
            let what = format!("seed {seed}, distance {distance}");
            assert_unrelated(&what, |c| bits(seed, c), |c| bits(seed, c + distance));
        }
    }
}

#[test]
fn neighbouring_seeds_are_unrelated() {
    for seed in SEEDS {
        for other in [seed ^ 1, seed.wrapping_add(1), seed ^ 1 << 63, !seed] {
            let what = format!("seeds {seed} and {other}");
            assert_unrelated(&what, |c| bits(seed, c), |c| bits(other, c));
        }
        // Seed and counter do not stand in for one another.
        assert_unrelated("exchanged", |c| bits(seed, c), |c| bits(c, seed));
    }
}

/// Flipping one bit of the counter or of the seed flips every bit of the result half of the time.
#[test]
fn every_input_bit_reaches_every_output_bit() {
    const SAMPLES: u64 = 4096;
    for flipped in 0..64 {
        for output in 0..32 {
            let (mut by_counter, mut by_seed) = (0, 0);
            for c in 0..SAMPLES {
                let base = bits(7, c);
                by_counter += u64::from((base ^ bits(7, c ^ 1 << flipped)) >> output & 1);
                by_seed += u64::from((base ^ bits(7 ^ 1 << flipped, c)) >> output & 1);
            }
            assert!(
                fair(by_counter, SAMPLES),
                "counter bit {flipped}: {by_counter}"
            );
            assert!(fair(by_seed, SAMPLES), "seed bit {flipped}: {by_seed}");
        }
    }
}

/// Chi-square over 256 cells of each byte, and over pairs of neighbours: 255 degrees of freedom have
/// a standard deviation of 22.6, so that six of them allow 120 to 391.
#[test]
fn cells_are_equally_full() {
    let chi_square = |cell: &dyn Fn(u64) -> usize| {
        let mut counts = [0u32; 256];
        (0..DRAWS).for_each(|c| counts[cell(c)] += 1);
        let expected = DRAWS as f64 / 256.0;
        counts
            .iter()
            .map(|&n| (f64::from(n) - expected).powi(2) / expected)
            .sum::<f64>()
    };
    for seed in SEEDS {
        for byte in 0..4 {
            let found = chi_square(&|c| (bits(seed, c) >> (8 * byte) & 0xFF) as usize);
            assert!(
                (120.0..391.0).contains(&found),
                "seed {seed}, byte {byte}: {found}"
            );
        }
        let pairs = chi_square(&|c| (bits(seed, c) >> 28 << 4 | bits(seed, c + 1) >> 28) as usize);
        assert!(
            (120.0..391.0).contains(&pairs),
            "seed {seed}, pairs: {pairs}"
        );
    }
}
