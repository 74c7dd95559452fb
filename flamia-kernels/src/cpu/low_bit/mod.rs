//! The low-bit paths where products apply block scales exactly: operands are held as the values
//! that their codes and scales stand for.
//!
//! Where a scale varies along a contraction within a hardware group, it is folded: the operand is
//! held as the values of its codes, and the other factor is multiplied with the scales before it is
//! rounded.

mod gradients;
mod operands;
mod prescale;
mod probabilities;

use std::ops::Range;

use flamia_format::e4m3::{self, E4M3};
use flamia_format::ue8m0::Ue8m0;
use flamia_format::{Element, ExponentRule, quantize_token_blocks_in_place};
use flamia_sched::{Mask, TILE};
use half::bf16;

use super::block::Block;
use super::exponential::Exp2;
use super::gemm::PAD;
use super::operands::{Fold, Prepared, Role, Rows, rotate};
use super::scheme::{BlockScheme, Folds, Pass, Scheme, SoftmaxGradients};
use super::softmax::Sums;
use crate::options::{
    Ablation, DkRounding, DqAccumulator, DsExponent, OperandScales, Options, Path, ValueScales,
};
use crate::stats::StatsSnapshot;

/// The largest magnitudes of the whole packed tensors, for scales that cover all of one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TensorMaxima {
    pub q: f32,
    pub k: f32,
    pub v: f32,
    pub d_o: f32,
}

/// The rounding of a block-scaled low-bit path.
#[derive(Clone, Copy)]
pub(crate) struct LowBit {
    path: Path,
    rule: ExponentRule,
    operand_scales: OperandScales,
    ds_exponent: DsExponent,
    value_scales: ValueScales,
    v_fold: bool,
    k_fold: bool,
    /// Seed of stochastic rounding, if the dK operand is rounded so.
    stochastic: Option<u64>,
    /// Elements of P in either pass, and of dS.
    p_forward: Element,
    p_backward: Element,
    ds: Element,
    exp_forward: Exp2,
    exp_backward: Exp2,
    c: f32,
    tau: f32,
    /// Whether O is divided by the sum of the rounded P.
    normalises_rounded: bool,
    dq: DqAccumulator,
    ablate: Option<Ablation>,
    /// Set if scales cover whole tensors.
    maxima: Option<TensorMaxima>,
}

impl LowBit {
    pub fn new(options: &Options, maxima: Option<TensorMaxima>) -> Self {
        let element = match options.path {
            Path::Fp4 => Element::E2M1,
            _ => Element::E4M3,
        };
        let four_bit_forward_only = options.ablate == Some(Ablation::P4Forward);
        let p_forward = if four_bit_forward_only {
            Element::E2M1
        } else {
            element
        };
        let p_backward = if four_bit_forward_only {
            Element::E4M3
        } else {
            element
        };
        Self {
            path: options.path,
            rule: match options.ablate {
                Some(Ablation::FloorExponents) => ExponentRule::Floor,
                _ => ExponentRule::Up,
            },
            operand_scales: options.operand_scales,
            ds_exponent: options.ds_exponent,
            value_scales: options.value_scales,
            v_fold: options.v_fold,
            k_fold: options.k_fold,
            stochastic: (options.dk_rounding == DkRounding::Stochastic).then_some(options.seed),
            p_forward,
            p_backward,
            ds: element,
            exp_forward: Exp2::forward(options),
            exp_backward: Exp2::backward(options),
            // Groups of a 4-bit P have scales of their own.
            c: match p_forward {
                Element::E4M3 => options.c as f32,
                Element::E2M1 => 0.0,
            },
            tau: options.tau,
            normalises_rounded: options.normalises_rounded(),
            dq: options.dq,
            ablate: options.ablate,
            maxima,
        }
    }
}

impl LowBit {
    /// Whether dS is made of the forward pass's P, where that is rounded to 4 bits (paper, section
    /// 3.3: the backward pass rebuilds what the forward pass used).
    fn rebuilds_p(&self) -> bool {
        self.p_forward == Element::E2M1 && self.p_backward == Element::E2M1
    }
}

/// The factor on an 8-bit P that dV is computed with (paper, appendix B.1).
const DV_P_SCALE: f32 = 256.0;

/// Rounds an operand to E4M3 token blocks in place and returns their exponents.
#[inline(always)]
pub(crate) fn quantize_tokens(rows: &mut Rows<f32>, rule: ExponentRule) -> Vec<Ue8m0> {
    let mut exponents = vec![Ue8m0::ZERO_BLOCK; rows.len.div_ceil(PAD)];
    let dim = rows.dim;
    quantize_token_blocks_in_place(rows.unpadded_mut(), dim, rule, &mut exponents);
    exponents
}

/// Multiplies each query row of a block, as far as it is visible, with the scale of its token.
#[inline(always)]
fn fold_queries(tile: &mut [f32], block: &Block, fold: &Fold<f32>) {
    for (i, row) in tile.chunks_exact_mut(TILE).enumerate() {
        let factor = fold.factors[block.row + i];
        row[block.visible(i)].iter_mut().for_each(|x| *x *= factor);
    }
}

/// Rounds to E4M3 and counts what had to be clamped.
#[inline(always)]
pub(crate) fn round_codes(values: &mut [f32]) -> u64 {
    let mut clamped = 0u32;
    for value in values {
        clamped += u32::from(value.abs() > E4M3::MAX);
        *value = e4m3::round(*value);
    }
    clamped.into()
}

/// Entries that are not zero.
#[inline(always)]
pub(crate) fn count_nonzero(values: &[f32]) -> u64 {
    values
        .iter()
        .map(|value| u32::from(*value != 0.0))
        .sum::<u32>()
        .into()
}

/// Rounds to BF16, the type of every result of the low-bit paths.
#[inline(always)]
pub(crate) fn round_bf16(values: &mut [f32]) {
    for value in values {
        *value = bf16::from_f32(*value).to_f32();
    }
}

impl Scheme for LowBit {
    type Real = f32;
    type Loaded = Prepared<f32>;

    #[inline(always)]
    fn rotate(&self, rows: &mut Rows<f32>) {
        let dim = rows.dim;
        rotate(rows.unpadded_mut(), dim);
    }
    #[inline(always)]
    fn quantize(&self, role: Role, rows: Rows<f32>) -> Prepared<f32> {
        self.prepare(role, rows)
    }
    #[inline(always)]
    fn round_output(&self, rows: &mut [f32]) {
        round_bf16(rows);
    }
}

impl BlockScheme for LowBit {
    #[inline(always)]
    fn c(&self) -> f32 {
        self.c
    }
    #[inline(always)]
    fn tau(&self) -> f32 {
        self.tau
    }
    #[inline(always)]
    fn dv_scale(&self) -> f32 {
        match self.p_backward {
            Element::E4M3 => DV_P_SCALE,
            Element::E2M1 => 1.0,
        }
    }

    #[inline(always)]
    fn per_key(&self, pass: Pass, mask: Mask, row: usize, key: usize) -> bool {
        let side = match (self.ablate, pass) {
            (Some(Ablation::GroupedV), _) => return false,
            (Some(Ablation::Tiling), Pass::Forward) => 2 * TILE,
            _ => TILE,
        };
        mask.is_causal() && row / side == key / side
    }

    #[inline(always)]
    fn probabilities(
        &self,
        scores: &mut [f32],
        max: f32,
        visible: &Range<usize>,
        fold: Option<(&Fold<f32>, usize)>,
    ) -> (Sums<f32>, u64) {
        self.row_probabilities(scores, max, visible, fold)
    }

    /// With an integer reference the scales of a 4-bit P are powers of two, and P does not depend on
    /// when the reference moved: the backward pass rebuilds it from the scores alone.
    #[inline(always)]
    fn reference(&self, max: f32) -> f32 {
        match self.p_forward {
            Element::E4M3 => max,
            Element::E2M1 => max.ceil(),
        }
    }

    #[inline(always)]
    fn exp2(&self, x: &mut [f32]) {
        self.exp_backward.apply(x);
    }

    #[inline(always)]
    fn rebuild(
        &self,
        p: &mut [f32],
        scores: &[f32],
        lse2: f32,
        visible: &Range<usize>,
        fold: Option<(&Fold<f32>, usize)>,
    ) -> bool {
        let rebuilds = self.rebuilds_p();
        if rebuilds {
            self.rebuild_row(p, scores, lse2, visible, fold);
        }
        rebuilds
    }

    /// The rounded probabilities do not sum to 1, and V is another one in dP than in the output: with
    /// D from the output, the rows of dS would not sum to 0 by far.
    #[inline(always)]
    fn sums_d(&self) -> bool {
        self.rebuilds_p() && self.ablate != Some(Ablation::OutputD)
    }

    #[inline(always)]
    fn round_p(&self, p: &mut [f32], block: &Block, fold: Option<&Fold<f32>>) -> u64 {
        self.round_backward_p(p, block, fold)
    }

    #[inline(always)]
    fn round_ds(
        &self,
        gradients: SoftmaxGradients<f32>,
        block: &Block,
        folds: Folds<f32>,
        head: usize,
    ) -> (bool, StatsSnapshot) {
        self.round_softmax_gradients(gradients, block, folds, head)
    }

    #[inline(always)]
    fn dq_prescales(
        &self,
        d_o: &Prepared<f32>,
        v: &Prepared<f32>,
        k: &Prepared<f32>,
        mask: Mask,
    ) -> Vec<f32> {
        // Rounding at most doubles a magnitude: dS, and P inside it if that is the rounded one.
        let roundings = if self.rebuilds_p() { 2 } else { 1 };
        let rounded = self.normalises_rounded;
        prescale::prescales(self.dq, roundings, rounded, d_o, v, k, mask)
    }

    #[inline(always)]
    fn add_dq(&self, dq: &mut [f32], partial: &[f32], prescale: f32) {
        prescale::add(self.dq, dq, partial, prescale);
    }
}
