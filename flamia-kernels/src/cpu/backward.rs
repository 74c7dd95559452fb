//! Backward pass of `reference` and of the block-scaled paths: one query head.
//!
//! Key tiles ascend, and inside each the query blocks that see it; every sum therefore has one
//! order, whatever the number of threads.

use std::ops::Range;

use flamia_sched::{Mask, TILE};

use super::block::Block;
use super::gemm::{Gemm, Operand, PAD, Shape};
use super::operands::{Panels, Prepared, Rows};
use super::real::{Real, lane_sum};
use super::scheme::{BlockScheme, Folds, Pass, SoftmaxGradients};
use super::simd::Task;
use super::softmax::fill_outside;
use crate::stats::StatsSnapshot;

/// Keys and values of one head of one document, in both orientations.
pub(crate) struct KeysValues<R> {
    pub k: Prepared<R>,
    pub v: Prepared<R>,
    pub k_panels: Panels<R>,
    pub v_panels: Panels<R>,
    /// V where dP reads it with per-key scales, if that differs.
    pub v_per_key_panels: Option<Panels<R>>,
}

/// A query head of one document and all that its backward pass reads.
pub(crate) struct QueryHead<'a, S: BlockScheme> {
    pub scheme: &'a S,
    pub kv: &'a KeysValues<S::Real>,
    /// Number of the head in the call, which stochastic rounding depends on.
    pub head: usize,
    pub q: &'a Prepared<S::Real>,
    pub d_o: &'a Prepared<S::Real>,
    /// Output of the forward pass.
    pub o: &'a Rows<S::Real>,
    /// Log-sum-exp of the forward pass, one per row.
    pub lse: &'a [S::Real],
    pub mask: Mask,
    /// Softmax scale.
    pub scale: f64,
}

/// Gradients of one head, padded to whole token blocks. dQ and dK are not multiplied by the softmax
/// scale yet, nor rotated back.
pub(crate) struct HeadGradients<R> {
    pub dq: Rows<R>,
    pub dk: Rows<R>,
    pub dv: Rows<R>,
    pub counts: StatsSnapshot,
}

/// Row-wise sums that the softmax gradient needs: D = rowsum(dO ∘ O), with the same dO that dP is
/// computed from (paper, section 3.3), and the log-sum-exp in base 2.
pub(crate) struct RowSums<R> {
    pub d: Vec<R>,
    pub lse2: Vec<R>,
}

impl<R: Real> RowSums<R> {
    #[inline(always)]
    pub fn new(d_o: &Rows<R>, o: &Rows<R>, lse: &[R]) -> Self {
        let padded = d_o.padded_len();
        let mut d = vec![R::ZERO; padded];
        let mut lse2 = vec![R::INFINITY; padded];
        for row in 0..d_o.len {
            d[row] = lane_sum(d_o.row(row).iter().zip(o.row(row)).map(|(x, y)| *x * *y));
            lse2[row] = lse[row] * R::from_f64(std::f64::consts::LOG2_E);
        }
        Self { d, lse2 }
    }
}

/// Turns dP into dS = P ∘ (dP - D), in place; keys that are not `visible` get 0.
#[inline(always)]
pub(crate) fn softmax_gradient<R: Real>(dp: &mut [R], p: &[R], visible: &Range<usize>, d: R) {
    for (dp, p) in dp[visible.clone()].iter_mut().zip(&p[visible.clone()]) {
        *dp = *p * (*dp - d);
    }
    fill_outside(dp, visible, R::ZERO);
}

impl<S: BlockScheme> Task for QueryHead<'_, S> {
    type Output = HeadGradients<S::Real>;

    #[inline(always)]
    fn run<G: Gemm>(self) -> Self::Output {
        let (q, d_o, kv) = (&self.q.dim, &self.d_o.dim, self.kv);
        let (len, dim) = (q.len, q.dim);
        let scale2 = S::Real::from_f64(self.scale * std::f64::consts::LOG2_E);
        let sums = RowSums::new(self.d_o.unrounded.as_ref().unwrap_or(d_o), self.o, self.lse);
        let prescales = self.scheme.dq_prescales(self.d_o, &kv.v, &kv.k, self.mask);
        let (q_over_tokens, q_fold) = self.q.over_tokens(false);
        let (d_o_over_tokens, d_o_fold) = self.d_o.over_tokens(false);
        let (k_over_tokens, k_fold) = kv.k.over_tokens(false);

        let [mut dq, mut dk, mut dv] = std::array::from_fn(|_| Rows::zeros(len, dim));
        let mut counts = StatsSnapshot::default();
        let mut p = vec![S::Real::ZERO; PAD * TILE];
        let mut rounded = [S::Real::ZERO; TILE];
        let mut ds = vec![S::Real::ZERO; PAD * TILE];
        let mut ds_for_dk = vec![S::Real::ZERO; PAD * TILE];
        let mut partial = vec![S::Real::ZERO; PAD * dim];

        for start in (0..len).step_by(TILE) {
            let keys = start..len.min(start + TILE);
            for row in (0..len).step_by(PAD) {
                let Some(block) = Block::new(row, &keys, len, self.mask) else {
                    continue;
                };
                let width = block.width;
                kv.k_panels
                    .scores::<G>(&mut p, TILE, q.operand(row), block.key, width);
                let per_key = self
                    .scheme
                    .per_key(Pass::Backward, self.mask, row, block.key);
                let special = kv.v_per_key_panels.as_ref().filter(|_| per_key);
                let v_panels = special.unwrap_or(&kv.v_panels);
                let v_fold = kv.v.over_tokens(per_key).1.map(|fold| (fold, block.key));
                v_panels.scores::<G>(&mut ds, TILE, d_o.operand(row), block.key, width);

                for i in 0..PAD {
                    let visible = block.visible(i);
                    let p = &mut p[i * TILE..][..width];
                    let ds = &mut ds[i * TILE..][..width];
                    let lse2 = sums.lse2[row + i];
                    for p in p.iter_mut() {
                        *p *= scale2;
                    }
                    let rounded = &mut rounded[..width];
                    let rebuilt = self.scheme.rebuild(rounded, p, lse2, &visible, v_fold);
                    for p in p.iter_mut() {
                        *p = *p - lse2;
                    }
                    self.scheme.exp2(p);
                    fill_outside(p, &visible, S::Real::ZERO);
                    let p = if rebuilt { rounded } else { p };
                    softmax_gradient(ds, p, &visible, sums.d[row + i]);
                }
                counts.saturated += self.scheme.round_p(&mut p, &block, d_o_fold);
                let gradients = SoftmaxGradients {
                    ds: &mut ds,
                    for_dk: &mut ds_for_dk,
                };
                let folds = Folds {
                    k: k_fold,
                    q: q_fold,
                };
                let (separate, rounded) = self.scheme.round_ds(gradients, &block, folds, self.head);
                counts += rounded;

                let shape = Shape::of_rows(width, PAD, dim);
                let dv = &mut dv.data[block.key * dim..];
                let p = Operand::transposed(&p, TILE);
                G::accumulate(dv, p, d_o_over_tokens.from(row), shape);
                let dk = &mut dk.data[block.key * dim..];
                let for_dk = Operand::transposed(if separate { &ds_for_dk } else { &ds }, TILE);
                G::accumulate(dk, for_dk, q_over_tokens.from(row), shape);

                partial.fill(S::Real::ZERO);
                let k = k_over_tokens.from(block.key);
                let shape = Shape::of_rows(PAD, width, dim);
                G::accumulate(&mut partial, Operand::rows(&ds, TILE), k, shape);
                let rows = dq.data[row * dim..].chunks_exact_mut(dim);
                let partials = partial.chunks_exact(dim);
                for ((dq, partial), prescale) in rows.zip(partials).zip(&prescales[row..]) {
                    self.scheme.add_dq(dq, partial, *prescale);
                }
            }
        }

        let one = S::Real::from_f64(1.0);
        for (dq, prescale) in dq.data.chunks_exact_mut(dim).zip(&prescales) {
            let unscale = one / *prescale;
            dq.iter_mut().for_each(|x| *x *= unscale);
        }
        let unscale = one / self.scheme.dv_scale();
        dv.data.iter_mut().for_each(|x| *x *= unscale);
        HeadGradients { dq, dk, dv, counts }
    }
}
