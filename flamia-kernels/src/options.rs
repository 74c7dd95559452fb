//! What a call computes and in which numerics.

use std::fmt;
use std::str::FromStr;

use flamia_sched::Mask;

use crate::error::AttentionError;

/// The precision path of a call (numerics of the paper's section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// Exact attention in the precision of the inputs (`f32`, or `f64` for `f64` inputs). Outputs
    /// are not rounded further.
    Reference,
    /// MXFP8: E4M3 operands with one exponent per 32 tokens, E4M3 probabilities at a fixed scale,
    /// E4M3 dS with its own exponents. Outputs are BF16 values.
    Mxfp8,
}

/// How block scales enter the matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Profile {
    /// The product multiplies each 32-long group of the contraction by its two scales exactly, as
    /// Blackwell's block-scaled MMA does. The paper's numerics.
    #[default]
    BlockScaled,
    /// The product is unscaled, as Hopper's FP8 MMA is: scales that vary along the contraction are
    /// folded into the operand held in FP32 before it is rounded.
    Hopper,
}

/// Where the partial sums of dQ are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DqAccumulator {
    /// FP16, multiplied by a power of two that rules an overflow out; sized from the largest
    /// ‖dO‖, ‖V‖ and |K| of the document and head (paper, appendix A.4).
    #[default]
    Fp16,
    /// FP32.
    Fp32,
}

/// How the `hopper` profile's matrix products accumulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MmaAccumulator {
    /// One FP32 fused multiply-add after another.
    #[default]
    Fp32,
    /// The accumulator of Hopper's FP8 MMA, bit for bit: 32 products and the accumulator are
    /// truncated to 13 fraction bits of the largest before they are added. Slow.
    Hopper,
}

/// Whether Q and K are rotated by a Hadamard matrix before they are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Hadamard {
    /// On at head dimension 128, off elsewhere: the paper's default.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

macro_rules! named {
    ($type:ty, $($variant:path => $name:literal),+ $(,)?) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $($variant => $name),+ })
            }
        }

        impl FromStr for $type {
            type Err = AttentionError;
            fn from_str(name: &str) -> Result<Self, Self::Err> {
                match name {
                    $($name => Ok($variant),)+
                    _ => Err(AttentionError::UnknownName {
                        what: stringify!($type),
                        name: name.to_owned(),
                        known: &[$($name),+],
                    }),
                }
            }
        }
    };
}

named!(Path, Path::Reference => "reference", Path::Mxfp8 => "mxfp8");
named!(Profile, Profile::BlockScaled => "block-scaled", Profile::Hopper => "hopper");
named!(DqAccumulator, DqAccumulator::Fp16 => "fp16", DqAccumulator::Fp32 => "fp32");
named!(MmaAccumulator, MmaAccumulator::Fp32 => "fp32", MmaAccumulator::Hopper => "hopper");
named!(Hadamard, Hadamard::Auto => "auto", Hadamard::On => "on", Hadamard::Off => "off");

/// Everything about a call but its tensors.
///
/// ```
/// use flamia_kernels::{Options, Path, Profile};
/// use flamia_sched::Mask;
///
/// let mut options = Options::new(Path::Mxfp8, Mask::Causal);
/// options.profile = Profile::Hopper;
/// options.validate(128).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Precision path.
    pub path: Path,
    /// Which keys a query sees inside its document.
    pub mask: Mask,
    /// Factor on Q·Kᵀ; `None` is 1/√head_dim.
    pub scale: Option<f64>,
    /// How scales enter the products of `mxfp8`.
    pub profile: Profile,
    /// Rotation of Q and K.
    pub hadamard: Hadamard,
    /// Probabilities are multiplied by 2^c before they are rounded to E4M3.
    pub c: i32,
    /// The running maximum is replaced only when a tile exceeds it by more than `tau`, in powers
    /// of two.
    pub tau: f32,
    /// Partial sums of dQ; the `hopper` profile accumulates in FP32 whatever is asked here.
    pub dq: DqAccumulator,
    /// The `hopper` profile lowers a running reference of dS when a tile falls under 2^-h of the
    /// largest code.
    pub hysteresis: i32,
    /// The accumulator of the `hopper` profile's products.
    pub accumulator: MmaAccumulator,
}

impl Options {
    /// The defaults of `path`.
    pub fn new(path: Path, mask: Mask) -> Self {
        Self {
            path,
            mask,
            scale: None,
            profile: Profile::default(),
            hadamard: Hadamard::default(),
            c: 4,
            tau: 4.0,
            dq: DqAccumulator::default(),
            hysteresis: 3,
            accumulator: MmaAccumulator::default(),
        }
    }

    /// Checks the options for `head_dim`; every call does.
    ///
    /// # Errors
    /// A head dimension that the path lacks; `c + tau` past log2(448), where probabilities would
    /// saturate without a trace (paper, appendix B.1); a scale or `tau` that is not a number.
    pub fn validate(&self, head_dim: usize) -> Result<(), AttentionError> {
        if !matches!(head_dim, 64 | 128) {
            return Err(AttentionError::HeadDim {
                head_dim,
                supported: &[64, 128],
            });
        }
        if let Some(scale) = self.scale
            && !scale.is_finite()
        {
            return Err(AttentionError::OutOfRange {
                option: "scale",
                value: scale,
                range: "any finite number",
            });
        }
        if !(0.0..=16.0).contains(&self.tau) {
            return Err(AttentionError::OutOfRange {
                option: "tau",
                value: self.tau.into(),
                range: "0 to 16",
            });
        }
        if !(0..=8).contains(&self.c) {
            return Err(AttentionError::OutOfRange {
                option: "c",
                value: self.c.into(),
                range: "0 to 8",
            });
        }
        if !(1..=32).contains(&self.hysteresis) {
            return Err(AttentionError::OutOfRange {
                option: "hysteresis",
                value: self.hysteresis.into(),
                range: "1 to 32",
            });
        }
        if self.c as f64 + f64::from(self.tau) > 448f64.log2() {
            return Err(AttentionError::Saturates {
                c: self.c,
                tau: self.tau,
            });
        }
        Ok(())
    }

    /// The factor on Q·Kᵀ.
    pub fn softmax_scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt())
    }

    /// Whether Q and K are rotated.
    pub fn rotates(&self, head_dim: usize) -> bool {
        self.path == Path::Mxfp8
            && match self.hadamard {
                Hadamard::Auto => head_dim == 128,
                Hadamard::On => true,
                Hadamard::Off => false,
            }
    }
}
