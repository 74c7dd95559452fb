//! NVFP4: 16 consecutive values of a row share one UE4M3 scale.

use super::amax_bits;
use crate::e2m1::{self, E2M1};
use crate::ue4m3::Ue4m3;

/// Consecutive values of a row that share one NVFP4 scale.
pub const NVFP4_GROUP: usize = 16;

/// Replaces the values of a row-major matrix with `cols` columns by what their NVFP4 codes stand
/// for.
///
/// A group's scale is UE4M3(amax / 6), a value's code E2M1(x / scale), both divisions in `f32`.
/// NVFP4's second scale, one FP32 number per tensor, is the constant 1: taken from the data it would
/// couple tokens and documents. So
/// - a group whose scale rounds to zero, which is what amax up to 6 · 2^-10 gives, becomes zeros;
/// - where amax is above 6 · 448 the scale saturates, and so do values above 2,688;
/// - a group with a NaN or an infinity becomes NaN, all of it.
///
/// # Panics
/// If `cols` is no multiple of 16, or `x` no whole number of rows of `cols` values.
#[inline(always)]
pub fn nvfp4_round_in_place(x: &mut [f32], cols: usize) {
    assert!(
        cols > 0 && cols.is_multiple_of(NVFP4_GROUP) && x.len().is_multiple_of(cols),
        "{} values are no whole number of rows of {cols} values, or those no whole number of \
         groups of {NVFP4_GROUP}",
        x.len()
    );
    for group in x.chunks_exact_mut(NVFP4_GROUP) {
        let scale = nvfp4_scale(group);
        let value = scale.to_f32();
        if scale == Ue4m3::ZERO {
            group.fill(0.0);
        } else {
            // A NaN scale makes every value NaN.
            for x in group {
                *x = e2m1::round(*x / value) * value;
            }
        }
    }
}

/// The codes of one group, and their scale.
pub(crate) fn encode_nvfp4(group: &[f32], codes: &mut [E2M1]) -> Ue4m3 {
    let scale = nvfp4_scale(group);
    if scale == Ue4m3::ZERO || scale.is_nan() {
        codes.fill(E2M1::ZERO);
    } else {
        let divisor = scale.to_f32();
        for (code, value) in codes.iter_mut().zip(group) {
            *code = E2M1::from_f32(value / divisor);
        }
    }
    scale
}

#[inline(always)]
fn nvfp4_scale(group: &[f32]) -> Ue4m3 {
    let amax = f32::from_bits(amax_bits(group));
    if amax.is_finite() {
        Ue4m3::from_f32(amax / E2M1::MAX)
    } else {
        Ue4m3::NAN
    }
}
