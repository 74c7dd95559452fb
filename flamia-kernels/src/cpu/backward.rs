//! Backward pass of `reference` and of block-scaled `mxfp8`: one query head.
//!
//! Key tiles ascend, and inside each the query blocks that see it; every sum therefore has one
//! order, whatever the number of threads.

use std::ops::Range;

use flamia_sched::{Mask, TILE};

use super::block::Block;
use super::gemm::{Gemm, Operand, PAD, Shape};
use super::operands::{Panels, Rows};
use super::real::{Real, lane_sum};
use super::scheme::BlockScheme;
use super::simd::Task;
use super::softmax::fill_outside;
use crate::stats::StatsSnapshot;

/// Keys and values of one head of one document, in both orientations.
pub(crate) struct KeysValues<R> {
    pub k: Rows<R>,
    pub v: Rows<R>,
    pub k_panels: Panels<R>,
    pub v_panels: Panels<R>,
}

/// A query head of one document and all that its backward pass reads.
pub(crate) struct QueryHead<'a, S: BlockScheme> {
    pub scheme: &'a S,
    pub kv: &'a KeysValues<S::Real>,
    pub q: &'a Rows<S::Real>,
    pub d_o: &'a Rows<S::Real>,
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
        let padded = d_o.data.len() / d_o.dim;
        let mut d = vec![R::ZERO; padded];
        let mut lse2 = vec![R::INFINITY; padded];
        for row in 0..d_o.len {
            d[row] = lane_sum(d_o.row(row).iter().zip(o.row(row)).map(|(x, y)| *x * *y));
            lse2[row] = lse[row] * R::from_f64(std::f64::consts::LOG2_E);
        }
        Self { d, lse2 }
    }
}

/// Turns products S into probabilities 2^(S · scale - lse2), in place; keys that are not `visible`
/// get 0.
#[inline(always)]
pub(crate) fn probabilities<R: Real>(s: &mut [R], visible: &Range<usize>, scale: R, lse2: R) {
    for s in s[visible.clone()].iter_mut() {
        *s = (*s * scale - lse2).exp2();
    }
    fill_outside(s, visible, R::ZERO);
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
        let (len, dim) = (self.q.len, self.q.dim);
        let kv = self.kv;
        let scale2 = S::Real::from_f64(self.scale * std::f64::consts::LOG2_E);
        let dv_scale = S::Real::from_f64(S::DV_P_SCALE);
        let sums = RowSums::new(self.d_o, self.o, self.lse);
        let prescale = self.scheme.dq_prescale(self.d_o, &kv.v, &kv.k);

        let [mut dq, mut dk, mut dv] = std::array::from_fn(|_| Rows::zeros(len, dim));
        let mut counts = StatsSnapshot::default();
        let mut p = vec![S::Real::ZERO; PAD * TILE];
        let mut ds = vec![S::Real::ZERO; PAD * TILE];
        let mut partial = vec![S::Real::ZERO; PAD * dim];

        for start in (0..len).step_by(TILE) {
            let keys = start..len.min(start + TILE);
            for row in (0..len).step_by(PAD) {
                let Some(block) = Block::new(row, &keys, len, self.mask) else {
                    continue;
                };
                let width = block.width;
                kv.k_panels
                    .scores::<G>(&mut p, TILE, self.q.operand(row), block.key, width);
                kv.v_panels
                    .scores::<G>(&mut ds, TILE, self.d_o.operand(row), block.key, width);

                for i in 0..PAD {
                    let visible = block.visible(i);
                    let p = &mut p[i * TILE..][..width];
                    let ds = &mut ds[i * TILE..][..width];
                    probabilities(p, &visible, scale2, sums.lse2[row + i]);
                    softmax_gradient(ds, p, &visible, sums.d[row + i]);
                    for p in p.iter_mut() {
                        *p *= dv_scale;
                    }
                    counts.saturated += self.scheme.round_p(p);
                }
                counts += self.scheme.round_ds(&mut ds, width);

                let shape = Shape::of_rows(width, PAD, dim);
                let d_o = self.d_o.from(row);
                let dv = &mut dv.data[block.key * dim..];
                G::accumulate(dv, Operand::transposed(&p, TILE), d_o, shape);
                let q = self.q.from(row);
                let dk = &mut dk.data[block.key * dim..];
                G::accumulate(dk, Operand::transposed(&ds, TILE), q, shape);

                partial.fill(S::Real::ZERO);
                let k = kv.k.from(block.key);
                let shape = Shape::of_rows(PAD, width, dim);
                G::accumulate(&mut partial, Operand::rows(&ds, TILE), k, shape);
                let dq = &mut dq.data[row * dim..][..PAD * dim];
                self.scheme
                    .add_dq(dq, &partial, S::Real::from_f64(prescale));
            }
        }

        let [unscale_q, unscale_v] =
            [prescale, S::DV_P_SCALE].map(|scale| S::Real::from_f64(1.0 / scale));
        dq.data.iter_mut().for_each(|x| *x *= unscale_q);
        dv.data.iter_mut().for_each(|x| *x *= unscale_v);
        HeadGradients { dq, dk, dv, counts }
    }
}
