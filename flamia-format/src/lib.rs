//! Low-bit element and scale formats, block quantisers and the Hadamard rotation.
//!
//! MXFP8 stores a tensor as [`E4M3`] codes that share one [`Ue8m0`] scale per block: a code stands
//! for `code · 2^e`. Attention uses two block shapes:
//!
//! - the *token block* ([`TokenBlocks`]): 32 consecutive rows of a document, all columns;
//! - the *square block* ([`SquareBlocks`]): 32 rows by 32 columns.
//!
//! In both, one set of codes and exponents serves the matrix and its transpose.
//!
//! Each quantiser exists twice: one yields codes, the other replaces `f32` values by what their
//! codes stand for, which is what the CPU reference computes with. Both give the same bits. The hot
//! functions are `#[inline(always)]`, so that they are compiled with the vector instructions that
//! their caller enables.
//!
//! All arithmetic needs IEEE 754 subnormals: a thread in flush-to-zero mode breaks the smallest
//! scales. This crate knows no device and no tensor library.

pub mod blocks;
pub mod e2m1;
pub mod e4m3;
pub mod exponent;
pub mod grouped;
pub mod hadamard;
pub mod layout;
pub mod packed;
pub mod per_tensor;
pub mod random;
mod rounding;
pub mod ue4m3;
pub mod ue8m0;

pub use blocks::{
    SquareBlocks, TokenBlocks, nvfp4_round_in_place, quantize_square_in_place,
    quantize_token_blocks_in_place, round_columns, round_columns_stochastic, round_group,
};
pub use e2m1::E2M1;
pub use e4m3::E4M3;
pub use exponent::{Element, ExponentRule, block_exponent, block_exponent_of, pow2};
pub use grouped::{Axis, GroupShape, GroupedTensor, MxTensor, Nvfp4Tensor};
pub use hadamard::{HadamardError, hadamard, hadamard_rows};
pub use layout::{LayoutError, ScaleLayout};
pub use per_tensor::{PerTensor, round_per_tensor};
pub use ue4m3::Ue4m3;
pub use ue8m0::Ue8m0;
