//! P: from scores to what P·V reads, and as dV reads it.

use std::ops::Range;

use flamia_format::ue8m0::Ue8m0;
use flamia_format::{E2M1, Element, ExponentRule, e2m1, pow2, round_columns};
use flamia_sched::TILE;

use super::{DV_P_SCALE, LowBit, fold_queries, round_codes};
use crate::cpu::block::Block;
use crate::cpu::exponential::Exp2;
use crate::cpu::gemm::PAD;
use crate::cpu::operands::Fold;
use crate::cpu::real::{Real, exp2_f32};
use crate::cpu::softmax::{Sums, fill_outside, lane_total, largest, relative};
use crate::options::Ablation;

/// log2 of E2M1's largest magnitude.
const LOG2_6: f32 = 2.584_962_5;

impl LowBit {
    #[inline(always)]
    pub(super) fn row_probabilities(
        &self,
        scores: &mut [f32],
        max: f32,
        visible: &Range<usize>,
        fold: Option<(&Fold<f32>, usize)>,
    ) -> (Sums<f32>, u64) {
        match self.p_forward {
            Element::E4M3 => {
                relative(scores, max, self.c);
                self.exponentiate(scores, self.exp_forward, visible);
                let exact = lane_total(scores);
                let (folded, clamped) = match fold {
                    None => (exact, round_codes(scores)),
                    Some((fold, key)) => round_folded(scores, visible, &fold.factors[key..]),
                };
                let sums = if self.normalises_rounded {
                    Sums {
                        exact,
                        folded,
                        rounded: lane_total(scores),
                    }
                } else {
                    Sums::unrounded(exact)
                };
                (sums, clamped)
            }
            Element::E2M1 => {
                let mut rounded = [0.0; TILE];
                let rounded = &mut rounded[..scores.len()];
                rounded.copy_from_slice(scores);
                let clamped = self.round_groups(rounded, self.exp_forward, max, visible, fold);
                relative(scores, max, self.c);
                self.exponentiate(scores, self.exp_forward, visible);
                let sums = Sums::unrounded(lane_total(scores));
                scores.copy_from_slice(rounded);
                (sums, clamped)
            }
        }
    }

    /// The forward pass's 4-bit P, normalised, from the scores of a row; V's scales taken out again.
    #[inline(always)]
    pub(super) fn rebuild_row(
        &self,
        p: &mut [f32],
        scores: &[f32],
        lse2: f32,
        visible: &Range<usize>,
        fold: Option<(&Fold<f32>, usize)>,
    ) {
        p.copy_from_slice(scores);
        fill_outside(p, visible, f32::NEG_INFINITY);
        // Near the reference of the forward pass; any integer gives the same codes.
        let reference = lse2.ceil();
        self.round_groups(p, self.exp_backward, reference, visible, fold);
        let normalise = exp2_f32(reference - lse2);
        match fold {
            None => p.iter_mut().for_each(|p| *p *= normalise),
            Some((fold, key)) => {
                for (p, exponent) in p.iter_mut().zip(&fold.exponents[key..]) {
                    // A token of zeros has no P left to unfold.
                    let unfold = exp2_f32(-exponent.max(-126.0));
                    *p *= unfold * normalise;
                }
            }
        }
    }

    #[inline(always)]
    fn exponentiate(&self, x: &mut [f32], exp2: Exp2, visible: &Range<usize>) {
        exp2.apply(x);
        if self.ablate == Some(Ablation::UnclampedPolynomial) {
            // It would give masked keys, at -∞, any weight; that is not what the ablation is about.
            fill_outside(x, visible, 0.0);
        }
    }

    /// E2M1 of 2^(score - reference) times V's scales, with one power of two per 32 keys, in the log
    /// domain: the largest logarithm of a group sets its exponent, which is subtracted from the
    /// exponential's argument (paper, section 3.5.2). `reference` is an integer.
    #[inline(always)]
    fn round_groups(
        &self,
        scores: &mut [f32],
        exp2: Exp2,
        reference: f32,
        visible: &Range<usize>,
        fold: Option<(&Fold<f32>, usize)>,
    ) -> u64 {
        if let Some((fold, key)) = fold {
            let exponents = &fold.exponents[key..][visible.clone()];
            for (score, exponent) in scores[visible.clone()].iter_mut().zip(exponents) {
                *score += exponent;
            }
        }
        let mut clamped = 0u32;
        for (index, group) in scores.chunks_exact_mut(PAD).enumerate() {
            let max = largest(group);
            let exponent = match self.rule {
                ExponentRule::Up => (max - LOG2_6).ceil(),
                ExponentRule::Floor => max.floor() - 2.0,
            };
            // A group that nothing is seen of has no exponent: any will do.
            let exponent = if max > f32::NEG_INFINITY {
                exponent
            } else {
                reference
            };
            for x in group.iter_mut() {
                *x -= exponent;
            }
            let first = index * PAD;
            let seen = seen_of_group(visible, first);
            self.exponentiate(group, exp2, &(seen.start - first..seen.end - first));
            let up = pow2((exponent - reference) as i32);
            for x in group {
                clamped += u32::from(*x > E2M1::MAX);
                *x = e2m1::round(*x) * up;
            }
        }
        clamped.into()
    }

    /// P of a block as dV reads it: contracted over queries.
    #[inline(always)]
    pub(super) fn round_backward_p(
        &self,
        p: &mut [f32],
        block: &Block,
        fold: Option<&Fold<f32>>,
    ) -> u64 {
        let width = block.width;
        match (self.p_backward, fold) {
            (Element::E4M3, None) => {
                let mut clamped = 0;
                for row in p.chunks_exact_mut(TILE) {
                    row[..width].iter_mut().for_each(|p| *p *= DV_P_SCALE);
                    clamped += round_codes(&mut row[..width]);
                }
                clamped
            }
            (Element::E4M3, Some(fold)) => round_folded_columns(p, block, &fold.factors),
            (Element::E2M1, fold) => {
                if let Some(fold) = fold {
                    fold_queries(p, block, fold);
                }
                let mut exponents = [Ue8m0::ZERO_BLOCK; TILE];
                let exponents = &mut exponents[..width];
                round_columns(p, PAD, width, TILE, Element::E2M1, self.rule, exponents);
                0
            }
        }
    }
}

/// E4M3 of P times V's scales, relative to the largest scale among the visible keys of each 32, so
/// that nothing is clamped and no unseen key has a say. Returns the sum before rounding too.
#[inline(always)]
fn round_folded(p: &mut [f32], visible: &Range<usize>, factors: &[f32]) -> (f32, u64) {
    let (mut sum, mut clamped) = (0.0, 0);
    for first in (0..p.len()).step_by(PAD) {
        let seen = seen_of_group(visible, first);
        let max = largest_factor(&factors[seen.clone()]);
        let (down, up) = inverse_and_self(max);
        for (p, factor) in p[seen.clone()].iter_mut().zip(&factors[seen]) {
            *p *= factor * down;
        }
        let group = &mut p[first..first + PAD];
        sum += lane_total(group) * up;
        clamped += round_codes(group);
        group.iter_mut().for_each(|p| *p *= up);
    }
    (sum, clamped)
}

/// E4M3 of P · 2^8 times dO's scales, relative to the largest scale among the queries of the block
/// that see the key.
#[inline(always)]
fn round_folded_columns(p: &mut [f32], block: &Block, factors: &[f32]) -> u64 {
    let mut max = [0.0f32; TILE];
    for i in 0..PAD {
        let factor = factors[block.row + i];
        for max in &mut max[block.visible(i)] {
            *max = Real::max(factor, *max);
        }
    }
    let scales = max.map(inverse_and_self);
    let mut clamped = 0;
    for (i, row) in p.chunks_exact_mut(TILE).enumerate() {
        let factor = factors[block.row + i] * DV_P_SCALE;
        let seen = block.visible(i);
        for (p, (down, _)) in row[seen.clone()].iter_mut().zip(&scales[seen]) {
            *p *= factor * down;
        }
        let row = &mut row[..block.width];
        clamped += round_codes(row);
        for (p, (_, up)) in row.iter_mut().zip(&scales) {
            *p *= up;
        }
    }
    clamped
}

/// What of the 32 keys from `first` on is visible.
#[inline(always)]
fn seen_of_group(visible: &Range<usize>, first: usize) -> Range<usize> {
    visible.start.clamp(first, first + PAD)..visible.end.clamp(first, first + PAD)
}

/// NaN left out; 0 if there is none.
#[inline(always)]
fn largest_factor(factors: &[f32]) -> f32 {
    factors
        .iter()
        .fold(0.0, |max, factor| Real::max(*factor, max))
}

/// For a power of two; 0 gives ones, for what is multiplied with them is 0 or NaN.
#[inline(always)]
fn inverse_and_self(power: f32) -> (f32, f32) {
    if power > 0.0 {
        (1.0 / power, power)
    } else {
        (1.0, 1.0)
    }
}
