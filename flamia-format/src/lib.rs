//! Low-bit element and scale formats, block quantisers and the Hadamard rotation.
//!
//! A low-bit tensor is codes of an *element* format, [`E4M3`] or [`E2M1`], that share *scales*,
//! [`Ue8m0`] powers of two or [`Ue4m3`]: a code stands for `code · scale`. What shares a scale:
//!
//! | | elements | scale | held as | rounded in place by |
//! | --- | --- | --- | --- | --- |
//! | token block: 32 rows of a document, all columns | E4M3 | UE8M0 | [`TokenBlocks`] | [`quantize_token_blocks_in_place`] |
//! | square block: 32 rows by 32 columns | E4M3 | UE8M0 | [`SquareBlocks`] | [`quantize_square_in_place`] |
//! | MXFP8 and MXFP4: 32 values of a row or column | E4M3, E2M1 | UE8M0 | [`MxTensor`] | [`round_group`], [`round_columns`] |
//! | per token or key: a row | E4M3, E2M1 | UE8M0 | [`MxTensor`] | [`round_group`] |
//! | NVFP4: 16 values of a row or column | E2M1 | UE4M3 | [`Nvfp4Tensor`] | [`nvfp4_round_in_place`] |
//! | the whole tensor | E4M3 | FP32 | [`PerTensor`] | [`round_per_tensor`] |
//!
//! One set of codes and exponents of a token block or a square block serves the matrix and its
//! transpose; groups of a row do not serve contractions over the rows. The per-tensor scale is for
//! comparison only, because it couples tokens and documents.
//!
//! Each quantiser exists twice: one yields codes, the other replaces `f32` values by what their
//! codes stand for, which is what the CPU reference computes with. Both give the same bits. The hot
//! functions are `#[inline(always)]`, so that they are compiled with the vector instructions that
//! their caller enables.
//!
//! Rounding is to nearest, ties to even, or stochastic ([`e2m1::round_stochastic`],
//! [`round_columns_stochastic`]) with bits that are a function of a seed and a counter ([`random`]).
//! [`layout`] has the scale atoms of block-scaled MMAs, and [`GroupedTensor::from_bytes`] reads other
//! libraries' tensors.
//!
//! All arithmetic needs IEEE 754 subnormals: a thread in flush-to-zero mode breaks the smallest
//! scales. This crate knows no device and no tensor library.

pub mod blocks;
mod code;
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
