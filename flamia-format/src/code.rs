//! What containers need to know of an element format's code.

use crate::e2m1::E2M1;
use crate::e4m3::E4M3;
use crate::exponent::Element;
use crate::packed::pack;

/// An element format's code.
pub(crate) trait Code: Copy {
    const ELEMENT: Element;
    const ZERO: Self;
    /// What a poisoned block is filled with.
    const POISON: Self;

    fn from_f32(x: f32) -> Self;

    /// Appends a line of codes, which starts and ends with a whole byte.
    fn store(codes: &[Self], bytes: &mut Vec<u8>);
}

impl Code for E4M3 {
    const ELEMENT: Element = Element::E4M3;
    const ZERO: Self = E4M3::ZERO;
    const POISON: Self = E4M3::NAN;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        E4M3::from_f32(x)
    }

    fn store(codes: &[Self], bytes: &mut Vec<u8>) {
        bytes.extend(codes.iter().map(|code| code.0));
    }
}

impl Code for E2M1 {
    const ELEMENT: Element = Element::E2M1;
    const ZERO: Self = E2M1::ZERO;
    /// There is no NaN code; the block's scale is NaN, and so is every product with it.
    const POISON: Self = E2M1::ZERO;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        E2M1::from_f32(x)
    }

    fn store(codes: &[Self], bytes: &mut Vec<u8>) {
        bytes.extend(pack(codes));
    }
}
