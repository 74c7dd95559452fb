//! E4M3 against ml_dtypes, and the bug reports NUM-12 and NUM-13 of other implementations.

mod support;

use flamia_format::E4M3;
use flamia_format::e4m3::round;
use support::element::Element;
use support::{e4m3_values, same};

fn element() -> Element {
    Element {
        values: e4m3_values(),
        sign: 0x80,
        encode: |x| E4M3::from_f32(x).0,
        round,
        f32_table: include_str!("tables/e4m3_from_f32.txt"),
    }
}

#[track_caller]
fn assert_encodes(x: f32, code: u8) {
    element().assert_encodes(x, code);
}

#[test]
fn all_codes_decode_and_encode_back() {
    for (code, &value) in (0u8..=255).zip(e4m3_values()) {
        assert!(same(E4M3(code).to_f32(), value), "{code:#04x}");
        assert_eq!(
            E4M3(code).to_f32().is_sign_negative(),
            code >= 0x80,
            "{code:#04x}"
        );
        assert_encodes(value, code);
    }
    assert!(E4M3(0x7F).is_nan() && E4M3(0xFF).is_nan());
    assert_eq!((0..=255).filter(|&code| E4M3(code).is_nan()).count(), 2);
}

#[test]
fn all_bf16_inputs() {
    element().check_bf16(include_str!("tables/e4m3_from_bf16.txt"));
}

#[test]
fn all_f16_inputs() {
    element().check_f16(include_str!("tables/e4m3_from_f16.txt"));
}

#[test]
fn f32_midpoints_and_their_neighbours() {
    element().check_f32_table(2 * 126 * 3 + 23);
}

/// A step of 1, every f32 there is, passes too and takes half a minute.
#[test]
fn a_sweep_of_f32() {
    element().sweep_f32(499);
}

#[test]
fn every_nan_stays_nan_with_its_sign() {
    for payload in [1, 0x000F_FFFF, 0x0010_0000, 0x0040_0000, 0x007F_FFFF] {
        for (sign, code) in [(0, 0x7F), (1 << 31, 0xFF)] {
            assert_encodes(f32::from_bits(sign | 0x7F80_0000 | payload), code);
        }
    }
}

/// NUM-12: overflow saturates, ties go to even.
#[test]
fn num_12_overflow_and_ties() {
    let above_464 = f32::from_bits(464f32.to_bits() + 1);
    for x in [448.0, 464.0, above_464, 465.0, 480.0, 1000.0, f32::INFINITY] {
        assert_encodes(x, 0x7E);
        assert_encodes(-x, 0xFE);
    }
    let tiny = 2f32.powi(-10);
    for (x, value) in [
        (2.0 * tiny, 2.0 * tiny),
        (tiny, 0.0),
        (f32::from_bits(tiny.to_bits() + 1), 2.0 * tiny),
        (3.0 * tiny, 4.0 * tiny),
        (5.0 * tiny, 4.0 * tiny),
        (4.25, 4.0),
        (4.75, 5.0),
    ] {
        assert_eq!(E4M3::from_f32(x).to_f32(), value, "{x:e}");
        assert_eq!(round(x), value, "{x:e}");
    }
}

/// NUM-13: the top binade is rounded like any other, and half-way goes to even, not up.
#[test]
fn num_13_top_binade_and_signed_zero() {
    for (x, value) in [
        (256.0, 256.0),
        (272.0, 256.0),
        (288.0, 288.0),
        (300.0, 288.0),
        (320.0, 320.0),
        (447.0, 448.0),
        (448.0, 448.0),
    ] {
        assert_eq!(E4M3::from_f32(x).to_f32(), value);
        assert_eq!(round(x), value);
    }
    assert_eq!(E4M3::from_f32(-0.0), E4M3(0x80));
    assert_eq!(round(-0.0).to_bits(), (-0.0f32).to_bits());
    // The smallest float underflows to a zero of its sign.
    assert_encodes(-f32::from_bits(1), 0x80);
}
