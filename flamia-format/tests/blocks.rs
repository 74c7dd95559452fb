//! The block quantisers against a search through the code table in f64.

mod support;

use flamia_format::blocks::BLOCK;
use flamia_format::{
    E4M3, ExponentRule, SquareBlocks, TokenBlocks, Ue8m0, quantize_square_in_place,
    quantize_token_blocks_in_place,
};
use proptest::prelude::*;
use support::{assert_same, e4m3_values};

const RULES: [ExponentRule; 2] = [ExponentRule::Up, ExponentRule::Floor];

/// The code nearest to `x`, of two equally near the even one, found by trying all of one sign.
fn nearest_code(values: &[f32], x: f64) -> u8 {
    let magnitude = (0..=0x7Eu8)
        .min_by(|&a, &b| {
            let distance = |code: u8| (f64::from(values[usize::from(code)]) - x.abs()).abs();
            (distance(a), a % 2)
                .partial_cmp(&(distance(b), b % 2))
                .unwrap()
        })
        .unwrap();
    magnitude | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Exponent, codes and values of one block by their definitions.
fn define_block(x: &[f32], rule: ExponentRule) -> (u8, Vec<u8>, Vec<f32>) {
    if x.iter().any(|v| !v.is_finite()) {
        return (255, vec![0x7F; x.len()], vec![f32::NAN; x.len()]);
    }
    if x.iter().all(|&v| v == 0.0) {
        return (0, vec![0; x.len()], vec![0.0; x.len()]);
    }
    let amax = x.iter().fold(0.0, |amax, &v| f64::from(v).abs().max(amax));
    let fits = |e: i32| match rule {
        ExponentRule::Up => amax * 2f64.powi(-e) <= 448.0,
        ExponentRule::Floor => amax * 2f64.powi(-e) < 512.0,
    };
    let e = (-127..=127).find(|&e| fits(e)).unwrap();
    let values = e4m3_values();
    let codes: Vec<u8> = x
        .iter()
        .map(|&v| nearest_code(values, f64::from(v) * 2f64.powi(-e)))
        .collect();
    let decoded = codes
        .iter()
        .map(|&code| (f64::from(values[usize::from(code)]) * 2f64.powi(e)) as f32)
        .collect();
    ((e + 127) as u8, codes, decoded)
}

/// Checks every way of quantising `x` as a token block and, if it fits, as a square block.
fn check_block(x: &[f32], cols: usize, rule: ExponentRule) {
    let (exponent, codes, values) = define_block(x, rule);
    let codes: Vec<E4M3> = codes.into_iter().map(E4M3).collect();

    let blocks = TokenBlocks::quantize(x, cols, rule);
    assert_eq!(blocks.exponents, [Ue8m0(exponent)]);
    assert_eq!(blocks.codes, codes);
    assert_same(&blocks.dequantize(), &values);

    let mut in_place = x.to_vec();
    let mut exponents = [Ue8m0(77)];
    quantize_token_blocks_in_place(&mut in_place, cols, rule, &mut exponents);
    assert_eq!(exponents, [Ue8m0(exponent)]);
    assert_same(&in_place, &values);

    if cols <= BLOCK {
        let blocks = SquareBlocks::quantize(x, cols, rule);
        assert_eq!(blocks.exponents, [Ue8m0(exponent)]);
        assert_eq!(blocks.codes, codes);
        assert_same(&blocks.dequantize(), &values);

        let mut in_place = x.to_vec();
        let found = quantize_square_in_place(&mut in_place, x.len() / cols, cols, cols, rule);
        assert_eq!(found, Ue8m0(exponent));
        assert_same(&in_place, &values);
    }
}

/// Finite values as attention meets them: of one magnitude, with outliers, of any magnitude, with
/// zeros of both signs and subnormals.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => -4f32..4.0,
        2 => (-4f32..4.0, -20i32..20).prop_map(|(v, e)| v * 2f32.powi(e)),
        1 => any::<f32>().prop_filter("finite", |v| v.is_finite()),
        1 => prop_oneof![Just(0.0f32), Just(-0.0), Just(f32::from_bits(1)), Just(-1e-40)],
    ]
}

fn matrix(rows: usize, cols: usize) -> impl Strategy<Value = (usize, Vec<f32>)> {
    (1..=rows, 1..=cols)
        .prop_flat_map(|(rows, cols)| (Just(cols), prop::collection::vec(value(), rows * cols)))
}

/// One value in a block that may also be NaN or infinite.
fn poison() -> impl Strategy<Value = f32> {
    prop_oneof![
        Just(f32::NAN),
        Just(-f32::NAN),
        Just(f32::INFINITY),
        Just(f32::NEG_INFINITY)
    ]
}

fn rule() -> impl Strategy<Value = ExponentRule> {
    prop_oneof![Just(ExponentRule::Up), Just(ExponentRule::Floor)]
}

fn transposed<T: Copy>(x: &[T], cols: usize) -> Vec<T> {
    (0..cols)
        .flat_map(|col| x.iter().skip(col).step_by(cols).copied())
        .collect()
}

proptest! {
    #[test]
    fn a_block_equals_its_definition((cols, x) in matrix(32, 40), scale in -140i32..120, rule in rule()) {
        check_block(&x, cols, rule);
        // The same mantissas at the ends of the range.
        let moved: Vec<f32> = x.iter().map(|&v| (f64::from(v) * 2f64.powi(scale)) as f32).collect();
        check_block(&moved, cols, rule);
    }

    #[test]
    fn rounding_up_keeps_every_element_within_its_error_bound((cols, x) in matrix(32, 8)) {
        let blocks = TokenBlocks::quantize(&x, cols, ExponentRule::Up);
        let unit = f64::from(blocks.exponents[0].to_f32());
        for (&v, &rounded) in x.iter().zip(&blocks.dequantize()) {
            let (v, rounded) = (f64::from(v), f64::from(rounded));
            // Nothing is clamped; f32 ends at 2^128, though.
            prop_assert!((v / unit).abs() <= 448.0);
            prop_assume!(rounded.is_finite());
            // Half a step: 2^-4 relative, or half of the subnormal step 2^-9.
            let bound = (v.abs() / 16.0).max(unit / 1024.0);
            prop_assert!((v - rounded).abs() <= bound, "{v:e} {rounded:e}");
        }
    }

    #[test]
    fn token_blocks_are_32_rows_and_the_last_may_be_short((cols, x) in matrix(100, 5), rule in rule()) {
        let blocks = TokenBlocks::quantize(&x, cols, rule);
        prop_assert_eq!((blocks.rows, blocks.cols), (x.len() / cols, cols));
        prop_assert_eq!(blocks.exponents.len(), blocks.rows.div_ceil(32));
        let mut in_place = x.clone();
        let mut exponents = vec![Ue8m0(77); blocks.exponents.len()];
        quantize_token_blocks_in_place(&mut in_place, cols, rule, &mut exponents);
        prop_assert_eq!(&exponents, &blocks.exponents);
        let mut values = Vec::new();
        for (block, exponent) in x.chunks(32 * cols).zip(&exponents) {
            let (expected, _, decoded) = define_block(block, rule);
            prop_assert_eq!(exponent.0, expected);
            values.extend(decoded);
        }
        assert_same(&in_place, &values);
        assert_same(&blocks.dequantize(), &values);
    }

    #[test]
    fn square_blocks_are_32_by_32_and_the_last_may_be_small((cols, x) in matrix(70, 70), rule in rule()) {
        let blocks = SquareBlocks::quantize(&x, cols, rule);
        let rows = x.len() / cols;
        let mut in_place = x.clone();
        let mut exponents = Vec::new();
        for top in (0..rows).step_by(32) {
            for left in (0..cols).step_by(32) {
                let (height, width) = ((rows - top).min(32), (cols - left).min(32));
                let block: Vec<f32> = (top..top + height)
                    .flat_map(|row| x[row * cols + left..][..width].to_vec())
                    .collect();
                exponents.push(Ue8m0(define_block(&block, rule).0));
                let found = quantize_square_in_place(
                    &mut in_place[top * cols + left..], height, width, cols, rule);
                prop_assert_eq!(Some(&found), exponents.last());
            }
        }
        prop_assert_eq!(&blocks.exponents, &exponents);
        assert_same(&blocks.dequantize(), &in_place);
    }

    #[test]
    fn transposing_square_blocks_keeps_codes_and_exponents((cols, x) in matrix(70, 70), rule in rule()) {
        let blocks = SquareBlocks::quantize(&x, cols, rule);
        let flipped = SquareBlocks::quantize(&transposed(&x, cols), blocks.rows, rule);
        prop_assert_eq!(flipped.codes, transposed(&blocks.codes, cols));
        prop_assert_eq!(flipped.exponents, transposed(&blocks.exponents, cols.div_ceil(32)));
    }

    #[test]
    fn poison_stays_in_its_token_block((cols, x) in matrix(100, 5), poison in poison(), at in any::<prop::sample::Index>(), rule in rule()) {
        let at = at.index(x.len());
        let block = at / (32 * cols);
        let mut poisoned = x.clone();
        poisoned[at] = poison;
        let clean = TokenBlocks::quantize(&x, cols, rule);
        let found = TokenBlocks::quantize(&poisoned, cols, rule);
        let mut in_place = poisoned;
        quantize_token_blocks_in_place(&mut in_place, cols, rule, &mut vec![Ue8m0(77); clean.exponents.len()]);
        for (index, (found, clean)) in in_place.iter().zip(clean.dequantize()).enumerate() {
            if index / (32 * cols) == block {
                prop_assert!(found.is_nan());
            } else {
                prop_assert_eq!(found.to_bits(), clean.to_bits());
            }
        }
        assert_same(&found.dequantize(), &in_place);
        prop_assert!(found.exponents[block].is_nan());
    }

    #[test]
    fn a_square_block_leaves_what_surrounds_it_alone(rows in 0usize..=32, cols in 0usize..=32, gap in 0usize..5, poison in poison()) {
        let stride = cols + gap + 1;
        let mut tile = vec![poison; rows * stride];
        for row in tile.chunks_mut(stride) {
            row[..cols].fill(1.0);
        }
        let before = tile.clone();
        let exponent = quantize_square_in_place(&mut tile, rows, cols, stride, ExponentRule::Up);
        assert_same(&tile, &before);
        prop_assert_eq!(exponent.exponent(), Some(if rows * cols == 0 { -127 } else { -8 }));
    }
}

/// The zero block: the smallest exponent and no negative zeros.
#[test]
fn a_block_of_zeros_has_the_smallest_exponent() {
    for rule in RULES {
        check_block(&[0.0, -0.0, -0.0, 0.0], 2, rule);
        assert_eq!(
            TokenBlocks::quantize(&[-0.0; 64], 2, rule).codes,
            [E4M3::ZERO; 64]
        );
    }
    // In a block with any other value, a negative zero stays one.
    assert_eq!(
        TokenBlocks::quantize(&[-0.0, 1.0], 1, ExponentRule::Up).codes[0],
        E4M3(0x80)
    );
}

/// Where 2^-e, e or the product leave f32's normal range.
#[test]
fn blocks_at_the_ends_of_f32() {
    let smallest = f32::from_bits(1);
    for rule in RULES {
        for amax in [
            smallest,
            2f32.powi(-137),
            f32::from_bits(2f32.powi(-137).to_bits() + 1),
            2f32.powi(-136),
            2f32.powi(-127),
            f32::MIN_POSITIVE,
            2f32.powi(-119),
            2f32.powi(-118),
            448.0 * 2f32.powi(-127),
            1.75 * 2f32.powi(127),
            1.9375 * 2f32.powi(127),
            f32::MAX,
        ] {
            check_block(&[amax, -amax, amax / 3.0, smallest, -0.0, 1e-38], 3, rule);
        }
    }
    // Up to 2^-137 everything rounds to zero, and the next float does not.
    let tiny = TokenBlocks::quantize(&[2f32.powi(-137)], 1, ExponentRule::Up);
    assert_eq!(tiny.codes, [E4M3::ZERO]);
    let above = f32::from_bits(2f32.powi(-137).to_bits() + 1);
    let tiny = TokenBlocks::quantize(&[above], 1, ExponentRule::Up);
    assert_eq!(tiny.dequantize(), [2f32.powi(-136)]);
}

/// From 1.9375 · 2^127 on the nearest value is 2^128, which is infinite in f32: loud, not wrong.
#[test]
fn the_very_largest_floats_round_to_infinity() {
    let edge = 1.9375 * 2f32.powi(127);
    let below = f32::from_bits(edge.to_bits() - 1);
    for (x, expected) in [(below, 1.875 * 2f32.powi(127)), (edge, f32::INFINITY)] {
        let blocks = TokenBlocks::quantize(&[x, 1.0], 1, ExponentRule::Up);
        assert_eq!(blocks.exponents[0].exponent(), Some(120));
        assert_eq!(blocks.dequantize()[0], expected);
    }
}

/// NUM-14: rounding up loses at most half a step of the maximum, flooring up to an eighth of it.
#[test]
fn num_14_the_maximum_after_the_round_trip() {
    let worst = |rule| {
        (0..1000)
            .map(|i| 1.0 + i as f32 / 1000.0)
            .map(|amax| 1.0 - TokenBlocks::quantize(&[amax], 1, rule).dequantize()[0] / amax)
            .fold(0.0, f32::max)
    };
    assert!(worst(ExponentRule::Up) <= 1.0 / 17.0);
    assert!(worst(ExponentRule::Floor) > 0.12);
}

/// The tests above would notice one wrong exponent: it changes nearly every value.
#[test]
fn a_wrong_exponent_changes_the_values() {
    let x: Vec<f32> = (0..32 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
    let blocks = TokenBlocks::quantize(&x, 64, ExponentRule::Up);
    let values = blocks.dequantize();
    assert!(values.iter().filter(|&&v| v != 0.0).count() * 10 >= 9 * x.len());
    let mut wrong = blocks;
    wrong.exponents[0].0 += 1;
    let changed = wrong
        .dequantize()
        .iter()
        .zip(&values)
        .filter(|(a, b)| a != b)
        .count();
    assert!(changed * 10 >= 9 * x.len());
}

#[test]
fn an_empty_document_has_no_block() {
    let blocks = TokenBlocks::quantize(&[], 64, ExponentRule::Up);
    assert_eq!(
        (blocks.rows, blocks.codes.len(), blocks.exponents.len()),
        (0, 0, 0)
    );
    assert_eq!(blocks.dequantize(), [0.0; 0]);
    quantize_token_blocks_in_place(&mut [], 64, ExponentRule::Up, &mut []);
    assert_eq!(
        SquareBlocks::quantize(&[], 64, ExponentRule::Up).exponents,
        []
    );
}
