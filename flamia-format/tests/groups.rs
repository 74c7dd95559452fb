//! Rounding in groups, in place, against numpy's tables and the definitions.

mod support;

use flamia_format::random::bits;
use flamia_format::{
    Element, ExponentRule, Ue8m0, e2m1, nvfp4_round_in_place, round_columns,
    round_columns_stochastic, round_group,
};
use proptest::prelude::*;
use support::groups::{mx_groups, nvfp4_groups};
use support::{assert_same, e2m1_values};

const ELEMENTS: [Element; 2] = [Element::E4M3, Element::E2M1];
const RULES: [ExponentRule; 2] = [ExponentRule::Up, ExponentRule::Floor];

fn element() -> impl Strategy<Value = Element> {
    prop::sample::select(&ELEMENTS[..])
}

fn rule() -> impl Strategy<Value = ExponentRule> {
    prop::sample::select(&RULES[..])
}

/// Mostly of one magnitude, some far off, some zero, rarely poisoned.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        12 => -4f32..4.0,
        4 => (-4f32..4.0, -20i32..20).prop_map(|(v, e)| v * 2f32.powi(e)),
        2 => any::<f32>(),
        2 => prop_oneof![Just(0.0f32), Just(-0.0)],
    ]
}

#[test]
fn mx_groups_equal_numpys() {
    for group in mx_groups() {
        let mut values = group.values.clone();
        let scale = round_group(&mut values, group.element, group.rule);
        assert_eq!(scale, Ue8m0(group.scale));
        assert_same(&values, &group.decoded());
    }
}

#[test]
fn nvfp4_groups_equal_numpys() {
    for group in nvfp4_groups() {
        let mut values = group.values.clone();
        nvfp4_round_in_place(&mut values, 16);
        assert_same(&values, &group.decoded());
    }
}

/// The ends of the UE4M3 scale.
#[test]
fn nvfp4_scales_vanish_and_saturate() {
    let round = |x: f32| {
        let mut group = [0.0; 16];
        (group[0], group[1]) = (x, -x / 4.0);
        nvfp4_round_in_place(&mut group, 16);
        (group[0], group[1].to_bits())
    };
    let vanishing = 6.0 * 2f32.powi(-10);
    assert_eq!(round(vanishing), (0.0, 0));
    let above = f32::from_bits(vanishing.to_bits() + 1);
    assert_eq!(round(above).0, 3.0 * 2f32.powi(-9));
    // 6 · 448, and what only the clamped scale can hold.
    assert_eq!(round(2688.0).0, 2688.0);
    assert_eq!(round(1e30), (2688.0, (-2688.0f32).to_bits()));
    assert_eq!(round(f32::MAX).0, 2688.0);
}

#[test]
#[should_panic(expected = "no whole number of groups of 16")]
fn nvfp4_refuses_a_row_that_ends_inside_a_group() {
    nvfp4_round_in_place(&mut [0.0; 48], 24);
}

#[test]
#[should_panic(expected = "groups of 33 rows")]
fn columns_refuse_more_than_32_rows() {
    let mut exponents = [Ue8m0::ZERO_BLOCK];
    let (element, rule) = (Element::E2M1, ExponentRule::Up);
    round_columns(&mut [0.0; 33], 33, 1, 1, element, rule, &mut exponents);
}

proptest! {
    /// Rounding again changes nothing.
    #[test]
    fn rounding_is_idempotent(
        values in prop::collection::vec(value(), 1..48), element in element(), rule in rule(),
    ) {
        let mut once = values;
        round_group(&mut once, element, rule);
        prop_assume!(once.iter().all(|v| !v.is_infinite()));
        let mut twice = once.clone();
        round_group(&mut twice, element, rule);
        assert_same(&twice, &once);
    }

    #[test]
    fn a_group_is_poisoned_as_a_whole(
        values in prop::collection::vec(-4f32..4.0, 1..48), at in any::<prop::sample::Index>(),
        poison in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        element in element(), rule in rule(),
    ) {
        let mut group = values.clone();
        group[at.index(values.len())] = poison;
        prop_assert!(round_group(&mut group, element, rule).is_nan());
        prop_assert!(group.iter().all(|v| v.is_nan()));

        let mut groups = vec![1.0; 48];
        groups[at.index(48)] = poison;
        nvfp4_round_in_place(&mut groups, 24 * 2);
        for (index, group) in groups.chunks(16).enumerate() {
            let poisoned = at.index(48) / 16 == index;
            prop_assert!(group.iter().all(|v| v.is_nan() == poisoned));
        }
    }

    /// Chunks of rows, of any number of groups, give the bits of the whole.
    #[test]
    fn nvfp4_groups_are_independent(
        values in prop::collection::vec(value(), 16 * 6), groups in 1usize..=6,
    ) {
        let mut whole = values.clone();
        nvfp4_round_in_place(&mut whole, 96);
        let mut parts = values;
        for part in parts.chunks_mut(16 * groups) {
            let cols = part.len();
            nvfp4_round_in_place(part, cols);
        }
        assert_same(&parts, &whole);
    }

    /// A column is a group, whatever lies beside it.
    #[test]
    fn columns_equal_their_groups(
        rows in 0usize..=32, cols in 0usize..150, gap in 0usize..4, element in element(),
        rule in rule(), seed in any::<u64>(), special in value(),
    ) {
        let stride = cols + gap;
        let tile = random_tile(rows, stride, seed, special);
        let mut found = tile.clone();
        let mut exponents = vec![Ue8m0(77); cols];
        round_columns(&mut found, rows, cols, stride, element, rule, &mut exponents);
        let mut expected = tile;
        for (col, &exponent) in exponents.iter().enumerate() {
            let mut column: Vec<f32> = (0..rows).map(|row| expected[row * stride + col]).collect();
            prop_assert_eq!(round_group(&mut column, element, rule), exponent);
            for (row, value) in column.into_iter().enumerate() {
                expected[row * stride + col] = value;
            }
        }
        assert_same(&found, &expected);
    }

    /// The stochastic variant: each value is the element's own stochastic rounding under the
    /// column's exponent, so that cutting the tile into parts changes no bit.
    #[test]
    fn stochastic_columns_depend_on_their_place_alone(
        rows in 1usize..=32, cols in 1usize..150, cut in any::<prop::sample::Index>(),
        seed in any::<u64>(), special in value(),
    ) {
        let tile = random_tile(rows, cols, seed, special);
        let place = |row: usize, col: usize| bits(seed, (row * cols + col) as u64);
        let rule = ExponentRule::Up;
        let mut whole = tile.clone();
        let mut exponents = vec![Ue8m0(77); cols];
        round_columns_stochastic(&mut whole, rows, cols, cols, rule, &mut exponents, place);

        let cut = cut.index(cols);
        let mut parts = tile.clone();
        let mut cut_exponents = vec![Ue8m0(77); cols];
        let (left, right) = cut_exponents.split_at_mut(cut);
        round_columns_stochastic(&mut parts, rows, cut, cols, rule, left, place);
        round_columns_stochastic(&mut parts[cut..], rows, cols - cut, cols, rule, right,
            |row, col| place(row, cut + col));
        prop_assert_eq!(&cut_exponents, &exponents);
        assert_same(&parts, &whole);

        let mut nearest = tile.clone();
        let mut nearest_exponents = vec![Ue8m0(77); cols];
        round_columns(&mut nearest, rows, cols, cols, Element::E2M1, rule, &mut nearest_exponents);
        prop_assert_eq!(nearest_exponents, exponents.clone());
        for (index, (&value, &x)) in whole.iter().zip(&tile).enumerate() {
            let exponent = exponents[index % cols];
            let Some(e) = exponent.exponent() else {
                prop_assert!(value.is_nan());
                continue;
            };
            if e > Ue8m0::MIN_EXPONENT {
                let scaled = (f64::from(x) * 2f64.powi(-e)) as f32;
                let rounded = e2m1::round_stochastic(scaled, place(index / cols, index % cols));
                prop_assert!(e2m1_values().contains(&rounded));
                prop_assert_eq!(f64::from(value), f64::from((f64::from(rounded) * 2f64.powi(e)) as f32));
            }
        }
    }
}

/// A tile of values of many magnitudes, a sixteenth of them `special`, one column of zeros.
fn random_tile(rows: usize, stride: usize, seed: u64, special: f32) -> Vec<f32> {
    (0..rows * stride)
        .map(|index| {
            let word = bits(seed, index as u64);
            let magnitude = 2f32.powi((word >> 20 & 0xF) as i32 - 8);
            match (index % stride, word >> 28) {
                (3, _) => -0.0,
                (_, 0) => special,
                _ => (word as i32 as f32) * 2f32.powi(-31) * magnitude,
            }
        })
        .collect()
}

/// The mean of a tile rounded under many seeds is the tile.
#[test]
fn stochastic_columns_are_unbiased() {
    const SEEDS: u64 = 4000;
    const COLS: usize = 8;
    let tile = random_tile(32, COLS, 5, 0.7);
    let mut exponents = [Ue8m0(77); COLS];
    let mut sums = vec![0.0; tile.len()];
    for seed in 0..SEEDS {
        let mut rounded = tile.clone();
        round_columns_stochastic(
            &mut rounded,
            32,
            COLS,
            COLS,
            ExponentRule::Up,
            &mut exponents,
            |row, col| bits(seed, (row * COLS + col) as u64),
        );
        for (sum, value) in sums.iter_mut().zip(rounded) {
            *sum += f64::from(value);
        }
    }
    let mut between = 0;
    for (index, (sum, &x)) in sums.iter().zip(&tile).enumerate() {
        let unit = f64::from(exponents[index % COLS].to_f32());
        let off = (sum / SEEDS as f64 - f64::from(x)).abs() / unit;
        // A draw deviates by at most half a step, 1 in E2M1's top binade.
        assert!(off <= 5.0 / (SEEDS as f64).sqrt(), "{x:e}: {off:e}");
        between += usize::from(off > 0.0);
    }
    assert!(between * 10 > 9 * (tile.len() - 32));
}
