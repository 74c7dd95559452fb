//! P and dS of one block of the backward pass, from the forward pass's codes.

use std::ops::Range;

use flamia_sched::TILE;

use super::{KeysValues, QueryOperands};
use crate::cpu::backward::softmax_gradient;
use crate::cpu::block::Block;
use crate::cpu::gemm::{Gemm, PAD};
use crate::cpu::low_bit::round_bf16;
use crate::cpu::real::exp2_f32;
use crate::cpu::softmax::fill_outside;

/// How dS is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gradients {
    /// In FP32, for the references of two kernels.
    Fp32,
    /// As the product of P and dP - D in BF16, for the products of one kernel.
    Bf16,
}

impl Gradients {
    /// Turns dP into dS, in place; keys that are not `visible` get 0.
    #[inline(always)]
    fn softmax(self, dp: &mut [f32], p: &[f32], visible: &Range<usize>, d: f32) {
        match self {
            Gradients::Fp32 => softmax_gradient(dp, p, visible, d),
            Gradients::Bf16 => {
                let mut factors = [0.0; TILE];
                let factors = &mut factors[..p.len()];
                factors.copy_from_slice(p);
                round_bf16(factors);
                dp.iter_mut().for_each(|dp| *dp -= d);
                round_bf16(dp);
                softmax_gradient(dp, factors, visible, 0.0);
                round_bf16(dp);
            }
        }
    }
}

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
    gradients: Gradients,
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
        gradients.softmax(dp, p, &visible, head.sums.d[block.row + i]);
    }
}
