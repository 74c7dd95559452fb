//! E2M1 against ml_dtypes.

mod support;

use flamia_format::E2M1;
use flamia_format::e2m1::round;
use support::e2m1_values;
use support::element::Element;

fn element() -> Element {
    Element {
        values: e2m1_values(),
        sign: 0x8,
        encode: |x| E2M1::from_f32(x).0,
        round,
        f32_table: include_str!("tables/e2m1_from_f32.txt"),
    }
}

#[test]
fn all_codes_decode_and_encode_back() {
    for (code, &value) in (0u8..16).zip(e2m1_values()) {
        assert_eq!(E2M1(code).to_f32().to_bits(), value.to_bits(), "{code:#x}");
        element().assert_encodes(value, code);
        // The high nibble, another element's in packed bytes, is not read.
        assert_eq!(E2M1(code | 0xA0).to_f32().to_bits(), value.to_bits());
    }
    assert_eq!(E2M1(0x7).to_f32(), E2M1::MAX);
}

#[test]
fn all_bf16_inputs() {
    element().check_bf16(include_str!("tables/e2m1_from_bf16.txt"));
}

#[test]
fn all_f16_inputs() {
    element().check_f16(include_str!("tables/e2m1_from_f16.txt"));
}

#[test]
fn f32_midpoints_and_their_neighbours() {
    element().check_f32_table(2 * 7 * 3 + 23);
}

/// A step of 1, every f32 there is, passes too.
#[test]
fn a_sweep_of_f32() {
    element().sweep_f32(499);
}

/// Half-way between two codes the even code wins, which is not always the smaller step.
#[test]
fn ties_go_to_the_even_code() {
    for (x, value) in [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
    ] {
        assert_eq!(round(x), value, "{x}");
        assert_eq!(E2M1::from_f32(-x).to_f32(), -value, "{x}");
    }
    assert_eq!(round(f32::INFINITY), 6.0);
    assert_eq!(E2M1::from_f32(f32::NEG_INFINITY).to_f32(), -6.0);
}

/// There is no code for NaN; only the value that stays in f32 can keep it.
#[test]
fn nan_saturates_as_a_code_and_stays_as_a_value() {
    for payload in [1, 0x0040_0000, 0x007F_FFFF] {
        let nan = f32::from_bits(0x7F80_0000 | payload);
        element().assert_encodes(nan, 0x7);
        element().assert_encodes(-nan, 0xF);
    }
}
