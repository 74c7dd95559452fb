//! UE4M3, the half without a sign, against ml_dtypes' E4M3.

mod support;

use flamia_format::Ue4m3;
use support::element::Element;
use support::{e4m3_values, same};

/// The magnitude is UE4M3's, the sign is put back: so E4M3's tables hold both of its halves to it.
fn element() -> Element {
    Element {
        values: e4m3_values(),
        sign: 0x80,
        encode: |x| Ue4m3::from_f32(x.abs()).0 | u8::from(x.is_sign_negative()) << 7,
        round: |x| Ue4m3::from_f32(x.abs()).to_f32().copysign(x),
        f32_table: include_str!("tables/e4m3_from_f32.txt"),
    }
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

#[test]
fn a_sweep_of_f32() {
    element().sweep_f32(499);
}

#[test]
fn all_scales_decode_and_encode_back() {
    for (byte, &value) in (0..=0x7Fu8).zip(e4m3_values()) {
        let scale = Ue4m3(byte);
        assert!(same(scale.to_f32(), value), "{byte:#04x}");
        assert_eq!(Ue4m3::from_f32(value), scale);
        assert_eq!(scale.is_nan(), byte == 0x7F);
        // The top bit is not read.
        assert!(same(Ue4m3(byte | 0x80).to_f32(), value));
        assert_eq!(Ue4m3(byte | 0x80).is_nan(), byte == 0x7F);
    }
    assert_eq!((Ue4m3::ONE.to_f32(), Ue4m3::MAX), (1.0, 448.0));
}

#[test]
fn zero_is_nearest_to_all_negative_numbers() {
    for bits in 0x8000..=u16::MAX {
        let x = f32::from_bits(u32::from(bits) << 16);
        let expected = if x.is_nan() { Ue4m3::NAN } else { Ue4m3::ZERO };
        assert_eq!(Ue4m3::from_f32(x), expected, "{x:e}");
    }
}
