//! A group of consecutive values that share one exponent: MX's 1x32, or a whole row.

use super::{BlockScale, amax_bits};
use crate::code::Code;
use crate::exponent::{Element, ExponentRule};
use crate::ue8m0::Ue8m0;
use crate::{e2m1, e4m3};

/// Replaces a group of any length by what its codes stand for, and returns its exponent.
#[inline(always)]
pub fn round_group(values: &mut [f32], element: Element, rule: ExponentRule) -> Ue8m0 {
    let scale = BlockScale::new(amax_bits(values), element, rule);
    match element {
        Element::E4M3 => scale.round(values, e4m3::round),
        Element::E2M1 => scale.round(values, e2m1::round),
    }
    scale.exponent()
}

/// The codes of a group, and its exponent.
pub(crate) fn encode_group<C: Code>(values: &[f32], codes: &mut [C], rule: ExponentRule) -> Ue8m0 {
    let scale = BlockScale::new(amax_bits(values), C::ELEMENT, rule);
    scale.encode(values, codes);
    scale.exponent()
}
