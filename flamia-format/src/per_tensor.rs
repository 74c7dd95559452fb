//! E4M3 with one FP32 scale for a whole tensor.
//!
//! What FP8 attention usually does, and what the probes show to leak: one large value anywhere, in
//! a later token or in another document, coarsens everything else. Here for comparison only.

use crate::blocks::amax_bits;
use crate::e4m3::{self, E4M3};

/// A tensor of E4M3 codes with one scale: a code stands for `code · scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct PerTensor {
    /// Codes, in the order of the values.
    pub codes: Vec<E4M3>,
    /// amax / 448. Zero if that rounds to zero, with all codes zero; NaN if a value is NaN or
    /// infinite, with all codes NaN.
    pub scale: f32,
}

impl PerTensor {
    /// Quantises a tensor: code = E4M3(x / scale), the division in `f32`.
    pub fn quantize(x: &[f32]) -> Self {
        let scale = per_tensor_scale(x);
        let codes = if scale == 0.0 {
            vec![E4M3::ZERO; x.len()]
        } else if scale.is_nan() {
            vec![E4M3::NAN; x.len()]
        } else {
            x.iter().map(|x| E4M3::from_f32(x / scale)).collect()
        };
        Self { codes, scale }
    }

    /// The values that the codes stand for.
    pub fn dequantize(&self) -> Vec<f32> {
        self.codes
            .iter()
            .map(|code| code.to_f32() * self.scale)
            .collect()
    }
}

/// Replaces a tensor by what [`PerTensor::quantize`] and then [`PerTensor::dequantize`] give, bit
/// for bit, and returns the scale.
#[inline(always)]
pub fn round_per_tensor(x: &mut [f32]) -> f32 {
    let scale = per_tensor_scale(x);
    if scale == 0.0 {
        x.fill(0.0);
    } else {
        // A NaN scale makes every value NaN.
        for x in x {
            *x = e4m3::round(*x / scale) * scale;
        }
    }
    scale
}

#[inline(always)]
fn per_tensor_scale(x: &[f32]) -> f32 {
    let amax = f32::from_bits(amax_bits(x));
    if amax.is_finite() {
        amax / E4M3::MAX
    } else {
        f32::NAN
    }
}
