//! UE4M3, NVFP4's 8-bit scale: E4M3 without a sign.

use crate::e4m3::E4M3;

/// A scale of 0 to 448 in E4M3's steps; `0x7F` is NaN. The top bit of every scale made here is
/// zero, and reading a scale ignores it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ue4m3(pub u8);

const VALUE: u8 = 0x7F;

impl Ue4m3 {
    /// The largest scale.
    pub const MAX: f32 = E4M3::MAX;
    /// Zero, the scale of a group whose magnitudes are too small for any other.
    pub const ZERO: Ue4m3 = Ue4m3(0x00);
    /// The scale 1.
    pub const ONE: Ue4m3 = Ue4m3(0x38);
    /// The scale of a group that holds a NaN or an infinity.
    pub const NAN: Ue4m3 = Ue4m3(0x7F);

    /// Rounds to nearest, ties to even. What is above 448, infinity included, saturates to 448,
    /// what is below zero to zero; NaN gives NaN.
    #[inline(always)]
    pub fn from_f32(x: f32) -> Self {
        // A NaN fails the comparison and is kept.
        let x = if x < 0.0 { 0.0 } else { x };
        Ue4m3(E4M3::from_f32(x).0 & VALUE)
    }

    /// The exact scale.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        E4M3(self.0 & VALUE).to_f32()
    }

    /// Whether this is the NaN scale.
    #[inline(always)]
    pub fn is_nan(self) -> bool {
        E4M3(self.0).is_nan()
    }
}
