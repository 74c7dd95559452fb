//! UE8M0 against ml_dtypes, the exponent rules against their definition in f64, and the bug reports
//! NUM-14 and NUM-17 of other implementations.

mod support;

use flamia_format::{Element, ExponentRule, Ue8m0, block_exponent, block_exponent_of, pow2};
use proptest::prelude::*;
use support::{decoded, same};

#[test]
fn all_scales_decode() {
    let table = decoded(include_str!("tables/ue8m0_decode.txt"), 8);
    for (byte, value) in (0u8..=255).zip(table) {
        let scale = Ue8m0(byte);
        assert!(same(scale.to_f32(), value), "{byte}");
        assert_eq!(scale.is_nan(), byte == 255);
        match scale.exponent() {
            Some(e) => assert_eq!(Ue8m0::from_exponent(e), scale),
            None => assert_eq!(byte, 255),
        }
        let inverse = f64::from(scale.recip_f32());
        assert!(
            inverse * f64::from(value) == 1.0 || byte == 255 && inverse.is_nan(),
            "{byte}"
        );
    }
}

#[test]
fn exponents_clamp_to_the_format() {
    for (e, byte) in [
        (i32::MIN, 0),
        (-128, 0),
        (-127, 0),
        (0, 127),
        (127, 254),
        (128, 254),
        (i32::MAX, 254),
    ] {
        assert_eq!(Ue8m0::from_exponent(e), Ue8m0(byte), "{e}");
    }
}

#[test]
fn powers_of_two_are_exact() {
    for e in -160..140 {
        // f64 holds them all, and rounds to zero and infinity where f32 ends. (2^-150 is a tie.)
        assert_eq!(pow2(e), 2f64.powi(e) as f32, "{e}");
    }
    assert_eq!((pow2(i32::MIN), pow2(i32::MAX)), (0.0, f32::INFINITY));
    assert_eq!(pow2(-149).to_bits(), 1);
}

/// The definitions, searched in f64: the smallest `e` of the format with `amax · 2^-e <= max`, and
/// the largest with `2^(e + k) <= amax`, 2^k being `max`'s binade.
fn searched_exponent(amax: f32, element: Element, rule: ExponentRule) -> i32 {
    let amax = f64::from(amax);
    let (max, k) = match element {
        Element::E4M3 => (448.0, 8),
        Element::E2M1 => (6.0, 2),
    };
    let mut candidates = -127..=127;
    match rule {
        ExponentRule::Up => candidates.find(|&e| amax * 2f64.powi(-e) <= max).unwrap(),
        ExponentRule::Floor => candidates
            .rfind(|&e| 2f64.powi(e + k) <= amax)
            .unwrap_or(-127),
    }
}

fn check_exponent(amax: f32) {
    for rule in [ExponentRule::Up, ExponentRule::Floor] {
        for element in [Element::E4M3, Element::E2M1] {
            let found = block_exponent_of(amax, element, rule);
            assert_eq!(
                found.exponent(),
                Some(searched_exponent(amax, element, rule)),
                "{amax:e}, {element:?}, {rule:?}"
            );
            assert_eq!(block_exponent_of(-amax, element, rule), found);
        }
        assert_eq!(
            block_exponent(amax, rule),
            block_exponent_of(amax, Element::E4M3, rule)
        );
    }
}

#[test]
fn exponents_at_the_edges_of_every_binade() {
    for biased in 0..255u32 {
        for mantissa in [
            0, 1, 0x3F_FFFF, 0x40_0000, 0x40_0001, 0x5F_FFFF, 0x60_0000, 0x60_0001, 0x7F_FFFF,
        ] {
            check_exponent(f32::from_bits(biased << 23 | mantissa));
        }
    }
}

proptest! {
    #[test]
    fn exponents_of_any_amax(bits in 0..f32::INFINITY.to_bits()) {
        check_exponent(f32::from_bits(bits));
    }
}

/// NUM-14: rounding up keeps every maximum within 448, where the floor rule clamps.
#[test]
fn num_14_the_rounding_of_the_scale() {
    for (amax, up, floor) in [
        (1.0f32, -8, -8),
        (1.75, -8, -8),
        (1.750_000_1, -7, -8),
        (448.0, 0, 0),
        (449.0, 1, 0),
        (500.0, 1, 0),
        (512.0, 1, 1),
    ] {
        assert_eq!(
            block_exponent(amax, ExponentRule::Up).exponent(),
            Some(up),
            "{amax}"
        );
        assert_eq!(
            block_exponent(amax, ExponentRule::Floor).exponent(),
            Some(floor),
            "{amax}"
        );
        assert!(amax / pow2(up) <= 448.0);
    }
}

/// NUM-17: the ends of the format are neither zero nor infinity.
#[test]
fn num_17_the_ends_of_the_scale() {
    for (byte, value) in [(0, 5.877_472e-39), (1, 2f32.powi(-126)), (127, 1.0)] {
        assert_eq!(Ue8m0(byte).to_f32(), value);
    }
    assert_eq!(Ue8m0(254).to_f32(), 2f32.powi(127));
    assert_eq!(Ue8m0(254).recip_f32(), 5.877_472e-39);
    assert!(Ue8m0(255).to_f32().is_nan() && Ue8m0(255).recip_f32().is_nan());

    for rule in [ExponentRule::Up, ExponentRule::Floor] {
        assert_eq!(
            block_exponent(2f32.powi(127), rule).exponent(),
            Some(127 - 8)
        );
        for poison in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            assert_eq!(block_exponent(poison, rule), Ue8m0::NAN);
        }
        assert_eq!(block_exponent(0.0, rule), Ue8m0::ZERO_BLOCK);
        assert_eq!(block_exponent(-0.0, rule), Ue8m0::ZERO_BLOCK);
    }
}
