//! Block quantisers: codes that share a scale.
//!
//! The [token block](TokenBlocks) and the [square block](SquareBlocks) hold E4M3 codes under a
//! power-of-two exponent; groups along a row ([`round_group`]) or down the columns of a tile
//! ([`round_columns`]) hold E4M3 or E2M1 codes; NVFP4's ([`nvfp4_round_in_place`]) are E2M1 under a
//! UE4M3 scale.
//!
//! Three kinds of block, told apart by the largest magnitude in it:
//!
//! - *zero*: every value is ±0. The exponent is the smallest one and every code is positive zero.
//! - *finite*: code = `E4M3(x · 2^-e)`, or E2M1's. The scaling is exact, except for products far
//!   below the smallest code. Dequantising is exact too, except for magnitudes from 1.9375 · 2^127
//!   (E4M3) or 1.75 · 2^127 (E2M1) on: they round up to 2^128, which `f32` shows as infinity.
//! - *poisoned*: some value is NaN or infinite. The scale is NaN and so is every code of a format
//!   that has one, so that nothing that reads any part of the block can be finite.

mod columns;
mod group;
mod nvfp4;
mod square;
mod token;

pub use columns::{round_columns, round_columns_stochastic};
pub(crate) use group::encode_group;
pub use group::round_group;
pub(crate) use nvfp4::encode_nvfp4;
pub use nvfp4::{NVFP4_GROUP, nvfp4_round_in_place};
pub use square::{SquareBlocks, quantize_square_in_place};
pub use token::{TokenBlocks, quantize_token_blocks_in_place};

use crate::code::Code;
use crate::exponent::{Element, ExponentRule, block_exponent_of};
use crate::ue8m0::Ue8m0;

/// Rows of a token block, and rows and columns of a square block.
pub const BLOCK: usize = 32;

/// The bits of the largest magnitude in `values`. Unlike `f32::max` this keeps a NaN, because NaN's
/// bits are above every number's.
#[inline(always)]
pub(crate) fn amax_bits(values: &[f32]) -> u32 {
    values
        .iter()
        .fold(0, |amax, value| amax.max(value.to_bits() & 0x7FFF_FFFF))
}

/// How the values of one block become codes.
#[derive(Clone, Copy)]
enum BlockScale {
    Zero,
    Finite(Ue8m0),
    Poisoned,
}

impl BlockScale {
    #[inline(always)]
    fn new(amax_bits: u32, element: Element, rule: ExponentRule) -> Self {
        let exponent = block_exponent_of(f32::from_bits(amax_bits), element, rule);
        if exponent.is_nan() {
            BlockScale::Poisoned
        } else if amax_bits == 0 {
            BlockScale::Zero
        } else {
            BlockScale::Finite(exponent)
        }
    }

    #[inline(always)]
    fn exponent(self) -> Ue8m0 {
        match self {
            BlockScale::Zero => Ue8m0::ZERO_BLOCK,
            BlockScale::Finite(exponent) => exponent,
            BlockScale::Poisoned => Ue8m0::NAN,
        }
    }

    /// The codes of a run of the block's values.
    fn encode<C: Code>(self, values: &[f32], codes: &mut [C]) {
        match self {
            BlockScale::Zero => codes.fill(C::ZERO),
            BlockScale::Poisoned => codes.fill(C::POISON),
            BlockScale::Finite(exponent) => {
                let down = exponent.recip_f32();
                for (code, value) in codes.iter_mut().zip(values) {
                    *code = C::from_f32(value * down);
                }
            }
        }
    }

    /// Replaces a run of the block's values by what their codes stand for, `round` being the
    /// element's rounding.
    #[inline(always)]
    fn round(self, values: &mut [f32], round: impl Fn(f32) -> f32) {
        match self {
            BlockScale::Zero => values.fill(0.0),
            BlockScale::Poisoned => values.fill(f32::NAN),
            BlockScale::Finite(exponent) => {
                let (down, up) = (exponent.recip_f32(), exponent.to_f32());
                for value in values {
                    *value = round(*value * down) * up;
                }
            }
        }
    }
}
