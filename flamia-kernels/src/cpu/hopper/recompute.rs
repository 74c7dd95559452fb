//! P and dS of one block of the backward pass, from the forward pass's codes.

use flamia_sched::TILE;

use super::{KeysValues, QueryOperands};
use crate::cpu::backward::softmax_gradient;
use crate::cpu::block::Block;
use crate::cpu::gemm::{Gemm, PAD};
use crate::cpu::real::exp2_f32;
use crate::cpu::softmax::fill_outside;

/// Fills [`PAD`] rows of `p` and `ds`, at a stride of [`TILE`], with the probabilities and the
/// softmax gradient of `block`. Entries that a query does not see are 0.
#[inline(always)]
pub(super) fn recompute<G: Gemm>(
    p: &mut [f32],
    ds: &mut [f32],
    block: &Block,
    kv: &KeysValues,
    head: &QueryOperands,
    scale: f64,
) {
    let width = block.width;
    kv.k_panels
        .scores::<G>(p, TILE, head.q.rows.operand(block.row), block.key, width);
    kv.v_panels
        .scores::<G>(ds, TILE, head.d_o.rows.operand(block.row), block.key, width);

    let scale2 = (scale * std::f64::consts::LOG2_E) as f32;
    let q_scale = scale2 * head.q.scale(block.row / PAD);
    let do_scale = head.d_o.scale(block.row / PAD);
    for i in 0..PAD {
        let visible = block.visible(i);
        let p = &mut p[i * TILE..][..width];
        let dp = &mut ds[i * TILE..][..width];
        let lse2 = head.sums.lse2[block.row + i];
        for (group, (p, dp)) in p
            .chunks_exact_mut(PAD)
            .zip(dp.chunks_exact_mut(PAD))
            .enumerate()
        {
            let group = block.key / PAD + group;
            let (k_scale, v_scale) = (kv.k.scale(group), kv.v.scale(group));
            for (p, dp) in p.iter_mut().zip(dp) {
                *p = exp2_f32(p.mul_add(q_scale * k_scale, -lse2));
                *dp *= do_scale * v_scale;
            }
        }
        fill_outside(p, &visible, 0.0);
        softmax_gradient(dp, p, &visible, head.sums.d[block.row + i]);
    }
}
