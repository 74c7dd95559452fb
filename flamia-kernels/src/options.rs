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
    /// Mixed NVFP4/FP8: scores and their recomputation from Q and K in NVFP4 (one scale per 16
    /// features of a token); everything else as in `mxfp8`.
    Nvfp4,
    /// All 4-bit: scores in NVFP4, every other operand in MXFP4 (E2M1 with one power of two per 32
    /// elements of the contraction), P and dS included.
    Fp4,
}

impl Path {
    /// Every path.
    pub const ALL: [Path; 4] = [Path::Reference, Path::Mxfp8, Path::Nvfp4, Path::Fp4];

    /// Whether operands are rounded.
    pub fn is_low_bit(self) -> bool {
        self != Path::Reference
    }
}

/// How block scales enter the matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Profile {
    /// As the device multiplies: `hopper` where a Hopper GPU computes, `block-scaled` elsewhere.
    #[default]
    Auto,
    /// The product multiplies each 32-long group of the contraction by its two scales exactly, as
    /// Blackwell's block-scaled MMA does. The paper's numerics.
    BlockScaled,
    /// The product is unscaled, as Hopper's FP8 MMA is: scales that vary along the contraction are
    /// folded into the operand held in FP32 before it is rounded.
    Hopper,
}

impl Profile {
    /// The profile that the reference backend computes with.
    pub fn on_host(self) -> Self {
        match self {
            Profile::Auto => Profile::BlockScaled,
            named => named,
        }
    }
}

/// Who computes on tensors that lie on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Backend {
    /// The GPU's kernels; what they lack is refused.
    #[default]
    Auto,
    /// The reference backend, on the host.
    Host,
}

/// Where the partial sums of dQ are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DqAccumulator {
    /// FP16, multiplied by a power of two that rules an overflow out; sized from the largest
    /// ‖dO‖, ‖V‖ and |K| of the document and head (paper, appendix A.4).
    #[default]
    Fp16,
    /// FP16 with one power of two per query row, sized from its own ‖dO‖ and from the largest ‖V‖
    /// and |K| up to the last key it sees: no later key can show in it. One of the exact options.
    Fp16Causal,
    /// FP32.
    Fp32,
}

/// How the backward pass of the `hopper` profile goes about dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum BackwardForm {
    /// On a GPU whichever is faster by a rule fitted to measurements, which knows the length of a document on
    /// average: one kernel for all but short ones, two for those. Two on the CPU.
    #[default]
    Auto,
    /// dK with dV, then dQ: P and dS twice, one reference of dS per row of either, and the same bits in
    /// every run. The deterministic form, whatever the rule would pick.
    TwoKernel,
    /// All three of one dS. It is BF16 for dQ and dK, and so are K and Q: E4M3 wants references, which cost more
    /// than products of BF16 do. The parts of dQ that come from each 128 keys are added up as [`Options::dq`]
    /// says, which a GPU does in no fixed order.
    OneKernel,
}

/// The sum of probabilities that the rows of O are divided by. LSE is always that of the unrounded ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Normaliser {
    /// `rounded` in the `hopper` profile, whose kernels have no other; `unrounded` elsewhere.
    #[default]
    Auto,
    /// Of the probabilities that P·V reads, rounded to E4M3: O is a mean of V's rows, so that
    /// D = rowsum(dO ∘ O) is off by no part of what those have in common, and rows of dS sum to 0.
    Rounded,
    /// Of the probabilities before they are rounded, as the paper has it.
    Unrounded,
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

/// What the scale of an operand covers, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum OperandScales {
    /// 32 tokens of the document: a later one can re-round those before it in its block.
    #[default]
    Block,
    /// One token. One of the exact options. Where such an operand is contracted over tokens, its
    /// scales are folded into the other operand before that is rounded.
    Token,
}

/// What an exponent of dS covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DsExponent {
    /// 32 queries by 32 keys.
    #[default]
    Square,
    /// 32 entries along the contraction of one row of the product: of one query row for dQ, of one
    /// key row for dK, which then read two roundings of dS. One of the exact options. `fp4` has no
    /// other.
    Row,
}

/// How 2^x is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Exponential {
    /// Within one unit in the last place of FP32.
    #[default]
    Exact,
    /// A share of the entries by a polynomial of low degree whose argument is clamped, as the
    /// kernels do on the FMA pipeline; see [`Polynomial`].
    Polynomial,
    /// Mitchell-P (paper, appendix C.1), for a 4-bit P. Inference only.
    MitchellP,
    /// Schraudolph's (paper, appendix C.2) for five of every eight pairs, for an 8-bit P. Inference
    /// only.
    Schraudolph,
}

impl Exponential {
    /// Whether it may not be trained through: the backward pass would have to rebuild the forward's
    /// probabilities with the same approximation, which costs more than the forward gains.
    pub fn is_inference_only(self) -> bool {
        matches!(self, Exponential::MitchellP | Exponential::Schraudolph)
    }
}

/// Which exponentials a polynomial evaluates, and how well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Polynomial {
    /// Degree, 2 to 5: largest relative error 1.7e-3, 7.5e-5, 2.8e-6 and 2e-7.
    pub degree: u32,
    /// Of every eight pairs of neighbouring keys, how many; 0 to 8.
    pub eighths: u32,
}

impl Default for Polynomial {
    fn default() -> Self {
        Self {
            degree: 3,
            eighths: 4,
        }
    }
}

/// Where the V of `fp4`'s P·V has one scale per key instead of one per 32 keys and feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ValueScales {
    /// On the diagonal 128x128 tiles, where a group of keys can straddle the causal boundary; under
    /// the full mask, which has no such tile, nowhere.
    #[default]
    Diagonal,
    /// On every tile.
    Everywhere,
}

/// How `fp4` rounds the dS operand of dK; every other rounding is to nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum DkRounding {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Up or down at random, unbiased; the bits follow from [`Options::seed`] and from the entry's
    /// head, query and key in its document (paper, appendix A.5).
    Stochastic,
}

/// A defect to study: what the paper reports to leak or to destabilise training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ablation {
    /// `fp4`: per-key V scales on the diagonal of 256x256 tiles in the forward pass, of 128x128 ones
    /// in the backward pass.
    Tiling,
    /// D from the unquantised dO, dP from the quantised one.
    UnquantisedD,
    /// `fp4`: D from the output, which comes of another V than dP and of probabilities that do not sum
    /// to 1, so that the rows of dS are far from summing to 0.
    OutputD,
    /// 4-bit P in the forward pass, 8-bit P in the backward pass.
    P4Forward,
    /// The bit-level exponential of the path in the forward pass, the exact one in the backward
    /// pass.
    ExpForward,
    /// Power-of-two scales by the MX specification's floor rule, which clamps the largest elements.
    FloorExponents,
    /// One FP32 scale for the whole packed tensor, for each of Q, K, V and dO: the scale of `mxfp8`'s
    /// codes, NVFP4's second scale.
    PerTensor,
    /// `fp4`: V in groups of 32 keys across the causal boundary too.
    GroupedV,
    /// A polynomial exponential of every entry without the clamp of its argument.
    UnclampedPolynomial,
    /// No check of c + tau: probabilities may saturate.
    Saturate,
}

impl Ablation {
    /// Every ablation.
    pub const ALL: [Ablation; 10] = [
        Ablation::Tiling,
        Ablation::UnquantisedD,
        Ablation::OutputD,
        Ablation::P4Forward,
        Ablation::ExpForward,
        Ablation::FloorExponents,
        Ablation::PerTensor,
        Ablation::GroupedV,
        Ablation::UnclampedPolynomial,
        Ablation::Saturate,
    ];

    /// Whether it changes anything on `path`.
    pub fn applies_to(self, path: Path) -> bool {
        match self {
            Ablation::Tiling | Ablation::GroupedV | Ablation::OutputD => path == Path::Fp4,
            Ablation::Saturate | Ablation::PerTensor => {
                matches!(path, Path::Mxfp8 | Path::Nvfp4)
            }
            _ => path.is_low_bit(),
        }
    }

    /// What whoever runs with it should be told.
    pub fn warning(self) -> String {
        format!(
            "`ablate = {self}` makes attention wrong on purpose; the results are for study only"
        )
    }
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

named!(
    Path,
    Path::Reference => "reference",
    Path::Mxfp8 => "mxfp8",
    Path::Nvfp4 => "nvfp4",
    Path::Fp4 => "fp4",
);
named!(
    Profile,
    Profile::Auto => "auto",
    Profile::BlockScaled => "block-scaled",
    Profile::Hopper => "hopper",
);
named!(Backend, Backend::Auto => "auto", Backend::Host => "host");
named!(
    DqAccumulator,
    DqAccumulator::Fp16 => "fp16",
    DqAccumulator::Fp16Causal => "fp16-causal",
    DqAccumulator::Fp32 => "fp32",
);
named!(
    BackwardForm,
    BackwardForm::Auto => "auto",
    BackwardForm::TwoKernel => "two-kernel",
    BackwardForm::OneKernel => "one-kernel",
);
named!(
    Normaliser,
    Normaliser::Auto => "auto",
    Normaliser::Rounded => "rounded",
    Normaliser::Unrounded => "unrounded",
);
named!(MmaAccumulator, MmaAccumulator::Fp32 => "fp32", MmaAccumulator::Hopper => "hopper");
named!(Hadamard, Hadamard::Auto => "auto", Hadamard::On => "on", Hadamard::Off => "off");
named!(OperandScales, OperandScales::Block => "block", OperandScales::Token => "token");
named!(DsExponent, DsExponent::Square => "square", DsExponent::Row => "row");
named!(
    Exponential,
    Exponential::Exact => "exact",
    Exponential::Polynomial => "polynomial",
    Exponential::MitchellP => "mitchell-p",
    Exponential::Schraudolph => "schraudolph",
);
named!(
    ValueScales,
    ValueScales::Diagonal => "diagonal",
    ValueScales::Everywhere => "everywhere",
);
named!(DkRounding, DkRounding::Nearest => "nearest", DkRounding::Stochastic => "stochastic");
named!(
    Ablation,
    Ablation::Tiling => "tiling",
    Ablation::UnquantisedD => "unquantised-d",
    Ablation::OutputD => "output-d",
    Ablation::P4Forward => "p4-forward",
    Ablation::ExpForward => "exp-forward",
    Ablation::FloorExponents => "floor-exponents",
    Ablation::PerTensor => "per-tensor",
    Ablation::GroupedV => "grouped-v",
    Ablation::UnclampedPolynomial => "unclamped-polynomial",
    Ablation::Saturate => "saturate",
);

/// Everything about a call but its tensors.
///
/// ```
/// use flamia_kernels::{Options, Path, Profile};
/// use flamia_sched::Mask;
///
/// let mut options = Options::new(Path::Mxfp8, Mask::Causal);
/// options.profile = Profile::Hopper;
/// options.validate(128).unwrap();
///
/// // No trace of a later token in an earlier result.
/// let exact = Options::new(Path::Nvfp4, Mask::Causal).exact();
/// exact.validate(96).unwrap();
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
    /// Who computes on tensors that lie on a GPU; buffers on the host are the host's.
    pub backend: Backend,
    /// Rotation of Q and K.
    pub hadamard: Hadamard,
    /// Probabilities are multiplied by 2^c before they are rounded to E4M3.
    pub c: i32,
    /// The running maximum is replaced only when a tile exceeds it by more than `tau`, in powers
    /// of two. 0 is the exact running maximum.
    pub tau: f32,
    /// What the rows of O are divided by.
    pub normaliser: Normaliser,
    /// Partial sums of dQ; the `hopper` profile's two-kernel form accumulates in FP32 whatever is
    /// asked here, and its one-kernel form has a power of two for each 32 queries. Where the
    /// [`backward`](Self::backward) form is for the rule to pick, sums other than FP16 make it two kernels.
    pub dq: DqAccumulator,
    /// What kernels the backward pass of the `hopper` profile is of; the other profile has one form.
    pub backward: BackwardForm,
    /// What a scale of Q, K, V or dO covers.
    pub operand_scales: OperandScales,
    /// What an exponent of dS covers.
    pub ds_exponent: DsExponent,
    /// How probabilities are evaluated, in both passes.
    pub exponential: Exponential,
    /// Degree and share of [`Exponential::Polynomial`].
    pub polynomial: Polynomial,
    /// `fp4`: where V has per-key scales, folded into P.
    pub value_scales: ValueScales,
    /// `fp4`: whether dP reads V with the forward's per-key scales on the tiles where P·V does.
    pub v_fold: bool,
    /// `fp4`: whether dQ reads K with per-key scales, folded into dS, instead of groups of 32 keys,
    /// which leak within their group.
    pub k_fold: bool,
    /// `fp4`: rounding of the dS operand of dK.
    pub dk_rounding: DkRounding,
    /// Seed of stochastic rounding. A training run takes another one for every call.
    pub seed: u64,
    /// The `hopper` profile lowers a running reference of dS when a tile falls under 2^-h of the
    /// largest code.
    pub hysteresis: i32,
    /// The accumulator of the `hopper` profile's products.
    pub accumulator: MmaAccumulator,
    /// A defect to study; print [`Ablation::warning`] wherever one is switched on.
    pub ablate: Option<Ablation>,
}

impl Options {
    /// The defaults of `path`.
    pub fn new(path: Path, mask: Mask) -> Self {
        let fp4 = path == Path::Fp4;
        Self {
            path,
            mask,
            scale: None,
            profile: Profile::default(),
            backend: Backend::default(),
            hadamard: Hadamard::default(),
            c: 4,
            tau: 4.0,
            normaliser: Normaliser::default(),
            dq: DqAccumulator::default(),
            backward: BackwardForm::default(),
            operand_scales: OperandScales::default(),
            ds_exponent: DsExponent::default(),
            exponential: Exponential::default(),
            polynomial: Polynomial::default(),
            value_scales: ValueScales::default(),
            v_fold: fp4,
            k_fold: fp4,
            dk_rounding: if fp4 {
                DkRounding::Stochastic
            } else {
                DkRounding::Nearest
            },
            seed: 0,
            hysteresis: 3,
            accumulator: MmaAccumulator::default(),
            ablate: None,
        }
    }

    /// With all exact options on: results of earlier positions are bitwise independent of later
    /// ones (paper, appendices A.3 and A.4).
    pub fn exact(self) -> Self {
        let fp4 = self.path == Path::Fp4;
        Self {
            operand_scales: OperandScales::Token,
            ds_exponent: DsExponent::Row,
            dq: DqAccumulator::Fp16Causal,
            v_fold: fp4,
            k_fold: fp4,
            ..self
        }
    }

    /// Checks the options for `head_dim`; every call does.
    ///
    /// # Errors
    /// A head dimension that the path lacks; `c + tau` past log2(448), where probabilities would
    /// saturate without a trace (paper, appendix B.1); a number out of its range; options that do
    /// not go together.
    pub fn validate(&self, head_dim: usize) -> Result<(), AttentionError> {
        let hopper = self.path == Path::Mxfp8 && self.profile == Profile::Hopper;
        let supported: &[usize] = if hopper {
            &[64, 128]
        } else {
            &[64, 96, 128, 256]
        };
        if !supported.contains(&head_dim) {
            return Err(AttentionError::HeadDim {
                head_dim,
                supported,
            });
        }
        self.check_numbers()?;
        self.check_combinations(head_dim, hopper)
    }

    /// As [`validate`](Self::validate), for a call that will be differentiated.
    ///
    /// # Errors
    /// Those of `validate`, and exponentials that are for inference only.
    pub fn validate_training(&self, head_dim: usize) -> Result<(), AttentionError> {
        self.validate(head_dim)?;
        if self.exponential.is_inference_only() {
            return Err(AttentionError::InferenceOnly {
                exponential: self.exponential,
            });
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), AttentionError> {
        let in_range = |option, value: f64, low: f64, high: f64, range| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(AttentionError::OutOfRange {
                    option,
                    value,
                    range,
                })
            }
        };
        if let Some(scale) = self.scale {
            in_range("scale", scale, f64::MIN, f64::MAX, "any finite number")?;
        }
        let Polynomial { degree, eighths } = self.polynomial;
        in_range("tau", self.tau.into(), 0.0, 16.0, "0 to 16")?;
        in_range("c", self.c.into(), 0.0, 8.0, "0 to 8")?;
        in_range("hysteresis", self.hysteresis.into(), 1.0, 32.0, "1 to 32")?;
        in_range("polynomial degree", degree.into(), 2.0, 5.0, "2 to 5")?;
        in_range("polynomial eighths", eighths.into(), 0.0, 8.0, "0 to 8")?;
        if self.ablate != Some(Ablation::Saturate)
            && self.c as f64 + f64::from(self.tau) > 448f64.log2()
        {
            return Err(AttentionError::Saturates {
                c: self.c,
                tau: self.tau,
            });
        }
        Ok(())
    }

    fn check_combinations(&self, head_dim: usize, hopper: bool) -> Result<(), AttentionError> {
        let refuse = |what: String, with: String, instead| {
            Err(AttentionError::Combination {
                what,
                with,
                instead,
            })
        };
        let path = format!("path {}", self.path);
        if self.hadamard == Hadamard::On && !head_dim.is_power_of_two() {
            return refuse(
                "hadamard on".into(),
                format!("head dimension {head_dim}"),
                "the rotation needs a power of two; use `auto` or `off`",
            );
        }
        if matches!(self.path, Path::Nvfp4 | Path::Fp4) && self.profile == Profile::Hopper {
            return refuse(
                "profile hopper".into(),
                path,
                "Hopper has no 4-bit products; use `block-scaled`",
            );
        }
        if self.path != Path::Fp4
            && (self.value_scales == ValueScales::Everywhere
                || self.v_fold
                || self.k_fold
                || self.dk_rounding == DkRounding::Stochastic)
        {
            return refuse(
                "value_scales, v_fold, k_fold or dk_rounding".into(),
                path,
                "they are options of `fp4`",
            );
        }
        let fits = match self.exponential {
            Exponential::Exact => true,
            Exponential::Polynomial => self.path.is_low_bit(),
            Exponential::MitchellP => self.path == Path::Fp4,
            Exponential::Schraudolph => matches!(self.path, Path::Mxfp8 | Path::Nvfp4),
        };
        if !fits {
            return refuse(
                format!("exponential {}", self.exponential),
                path,
                "`polynomial` goes with every low-bit path, `mitchell-p` with `fp4`, `schraudolph` \
                 with `mxfp8` and `nvfp4`",
            );
        }
        if self.normaliser == Normaliser::Rounded && !self.rounds_to_e4m3() {
            return refuse(
                format!("normaliser {}", self.normaliser),
                match self.ablate {
                    Some(ablation) if self.path != Path::Fp4 => format!("ablate {ablation}"),
                    _ => path,
                },
                "it is the sum of probabilities in E4M3; `fp4` has its D from another sum already",
            );
        }
        if hopper
            && (self.operand_scales != OperandScales::Block
                || self.ds_exponent != DsExponent::Square
                || self.exponential != Exponential::Exact
                || self.ablate.is_some())
        {
            return refuse(
                "operand_scales, ds_exponent, exponential or ablate".into(),
                "profile hopper".into(),
                "the profile follows the Hopper kernels, which have none of them; use `block-scaled`",
            );
        }
        if self.backward == BackwardForm::OneKernel {
            let backward = || format!("backward {}", self.backward);
            if !hopper {
                return refuse(
                    backward(),
                    format!("path {}, profile {}", self.path, self.profile),
                    "it is a form of `mxfp8` with profile `hopper`",
                );
            }
            if self.dq == DqAccumulator::Fp16Causal {
                return refuse(
                    backward(),
                    format!("dq {}", self.dq),
                    "its references follow tiles of queries; use `fp16`, `fp32`, or `auto` or `two-kernel`",
                );
            }
        }
        if let Some(ablation) = self.ablate
            && !ablation.applies_to(self.path)
        {
            return refuse(
                format!("ablate {ablation}"),
                path,
                "it would change nothing there",
            );
        }
        Ok(())
    }

    /// Whether the P of P·V is rounded to E4M3.
    fn rounds_to_e4m3(&self) -> bool {
        matches!(self.path, Path::Mxfp8 | Path::Nvfp4) && self.ablate != Some(Ablation::P4Forward)
    }

    /// Whether rows of O are divided by the sum of rounded probabilities.
    pub fn normalises_rounded(&self) -> bool {
        match self.normaliser {
            Normaliser::Auto => self.profile == Profile::Hopper && self.rounds_to_e4m3(),
            Normaliser::Rounded => true,
            Normaliser::Unrounded => false,
        }
    }

    /// The factor on Q·Kᵀ.
    pub fn softmax_scale(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt())
    }

    /// Whether Q and K are rotated.
    pub fn rotates(&self, head_dim: usize) -> bool {
        match self.hadamard {
            Hadamard::Auto => matches!(self.path, Path::Mxfp8 | Path::Nvfp4) && head_dim == 128,
            Hadamard::On => self.path.is_low_bit(),
            Hadamard::Off => false,
        }
    }
}
