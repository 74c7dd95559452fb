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

/// [`PAD`] query rows against the keys of a block, at a stride of [`TILE`].
struct Recomputed<R> {
    /// Probabilities.
    p: Vec<R>,
    /// Those that dS is made of, where they are not `p`.
    p_of_ds: Vec<R>,
    dp: Vec<R>,
}

impl<R: Real> Recomputed<R> {
    fn new() -> Self {
        let [p, p_of_ds, dp] = std::array::from_fn(|_| vec![R::ZERO; PAD * TILE]);
        Self { p, p_of_ds, dp }
    }
}

impl<S: BlockScheme> QueryHead<'_, S> {
    /// Fills `tile` for `block`; returns whether dS has probabilities of its own.
    #[inline(always)]
    fn recompute<G: Gemm>(
        &self,
        tile: &mut Recomputed<S::Real>,
        d_o: &Rows<S::Real>,
        block: &Block,
        lse2: &[S::Real],
    ) -> bool {
        let Block {
            row, key, width, ..
        } = *block;
        let kv = self.kv;
        let scale2 = S::Real::from_f64(self.scale * std::f64::consts::LOG2_E);
        let q = self.q.dim.operand(row);
        kv.k_panels.scores::<G>(&mut tile.p, TILE, q, key, width);
        let per_key = self.scheme.per_key(Pass::Backward, self.mask, row, key);
        let special = kv.v_per_key_panels.as_ref().filter(|_| per_key);
        let v_panels = special.unwrap_or(&kv.v_panels);
        v_panels.scores::<G>(&mut tile.dp, TILE, d_o.operand(row), key, width);
        let v_fold = kv.v.over_tokens(per_key).1.map(|fold| (fold, key));

        let mut rebuilt = false;
        for i in 0..PAD {
            let visible = block.visible(i);
            let p = &mut tile.p[i * TILE..][..width];
            let p_of_ds = &mut tile.p_of_ds[i * TILE..][..width];
            for p in p.iter_mut() {
                *p *= scale2;
            }
            rebuilt = self
                .scheme
                .rebuild(p_of_ds, p, lse2[row + i], &visible, v_fold);
            for p in p.iter_mut() {
                *p = *p - lse2[row + i];
            }
            self.scheme.exp2(p);
            fill_outside(p, &visible, S::Real::ZERO);
        }
        rebuilt
    }

    /// The keys of a tile that a block of queries sees.
    #[inline(always)]
    fn block(&self, row: usize, tile: usize) -> Option<Block> {
        let len = self.q.dim.len;
        let keys = tile * TILE..len.min((tile + 1) * TILE);
        Block::new(row, &keys, len, self.mask)
    }

    /// D as the mean of dP over the probabilities that dS is made of: rows of dS sum to 0, whatever
    /// those sum to.
    #[inline(always)]
    fn sum_d<G: Gemm>(&self, d_o: &Rows<S::Real>, sums: &mut RowSums<S::Real>) {
        let len = self.q.dim.len;
        let mut tile = Recomputed::new();
        for row in (0..len).step_by(PAD) {
            let mut totals = [[S::Real::ZERO; 2]; PAD];
            for key_tile in 0..len.div_ceil(TILE) {
                let Some(block) = self.block(row, key_tile) else {
                    continue;
                };
                let rebuilt = self.recompute::<G>(&mut tile, d_o, &block, &sums.lse2);
                let p = if rebuilt { &tile.p_of_ds } else { &tile.p };
                for (i, [p_dp, total]) in totals.iter_mut().enumerate() {
                    let seen = block.visible(i);
                    let p = &p[i * TILE..][seen.clone()];
                    let dp = &tile.dp[i * TILE..][seen];
                    *p_dp += lane_sum(p.iter().zip(dp).map(|(p, dp)| *p * *dp));
                    *total += lane_sum(p.iter().copied());
                }
            }
            for (d, [p_dp, total]) in sums.d[row..len.min(row + PAD)].iter_mut().zip(totals) {
                // Codes that are all zero give a dS of zeros.
                *d = if total == S::Real::ZERO {
                    total
                } else {
                    p_dp / total
                };
            }
        }
    }
}

impl<S: BlockScheme> Task for QueryHead<'_, S> {
    type Output = HeadGradients<S::Real>;

    #[inline(always)]
    fn run<G: Gemm>(self) -> Self::Output {
        let (len, dim) = (self.q.dim.len, self.q.dim.dim);
        let d_o_of_d = self.d_o.unrounded.as_ref().unwrap_or(&self.d_o.dim);
        let mut sums = RowSums::new(d_o_of_d, self.o, self.lse);
        if self.scheme.sums_d() {
            self.sum_d::<G>(d_o_of_d, &mut sums);
        }
        let prescales = self
            .scheme
            .dq_prescales(self.d_o, &self.kv.v, &self.kv.k, self.mask);
        let (q, q_fold) = self.q.over_tokens(false);
        let (d_o, d_o_fold) = self.d_o.over_tokens(false);
        let (k, k_fold) = self.kv.k.over_tokens(false);

        let [mut dq, mut dk, mut dv] = std::array::from_fn(|_| Rows::zeros(len, dim));
        let mut counts = StatsSnapshot::default();
        let mut tile = Recomputed::new();
        let mut ds_for_dk = vec![S::Real::ZERO; PAD * TILE];
        let mut partial = vec![S::Real::ZERO; PAD * dim];

        for key_tile in 0..len.div_ceil(TILE) {
            for row in (0..len).step_by(PAD) {
                let Some(block) = self.block(row, key_tile) else {
                    continue;
                };
                let width = block.width;
                let rebuilt = self.recompute::<G>(&mut tile, &self.d_o.dim, &block, &sums.lse2);
                let Recomputed { p, p_of_ds, dp: ds } = &mut tile;
                for i in 0..PAD {
                    let p = if rebuilt { &*p_of_ds } else { &*p };
                    let p = &p[i * TILE..][..width];
                    let ds = &mut ds[i * TILE..][..width];
                    softmax_gradient(ds, p, &block.visible(i), sums.d[row + i]);
                }
                counts.saturated += self.scheme.round_p(p, &block, d_o_fold);
                let gradients = SoftmaxGradients {
                    ds,
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
                G::accumulate(dv, Operand::transposed(p, TILE), d_o.from(row), shape);
                let dk = &mut dk.data[block.key * dim..];
                let for_dk = Operand::transposed(if separate { &ds_for_dk } else { ds }, TILE);
                G::accumulate(dk, for_dk, q.from(row), shape);

                partial.fill(S::Real::ZERO);
                let shape = Shape::of_rows(PAD, width, dim);
                let ds = Operand::rows(ds, TILE);
                G::accumulate(&mut partial, ds, k.from(block.key), shape);
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
