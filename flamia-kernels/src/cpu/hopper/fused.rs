//! dK and dQ of the one-kernel form of the `hopper` backward pass. Their products are of BF16: dS, of
//! P and dP - D rounded to that, and what the codes of Q and K stand for. Each key tile's part of dQ is added up in FP16 or FP32.

use flamia_format::exponent::pow2;
use flamia_sched::TILE;

use super::keys::Blocks;
use super::{Hopper, KeysValues, QueryOperands};
use crate::cpu::f16::round_f16;
use crate::cpu::gemm::{Gemm, Operand, PAD, Shape};
use crate::cpu::operands::Rows;
use crate::options::DqAccumulator;

/// dQ of all query heads of a key/value head, on the way.
pub(super) struct FusedGradients<'a> {
    scheme: &'a Hopper,
    /// What K's codes stand for, and those of each head of Q: values of BF16.
    k: Rows<f32>,
    q: Vec<Rows<f32>>,
    heads: &'a [QueryOperands],
    dq: Vec<Rows<f32>>,
    /// The largest exponents of V and of K together.
    key_exponent: i32,
    part: Vec<f32>,
}

impl<'a> FusedGradients<'a> {
    pub fn new(scheme: &'a Hopper, kv: &'a KeysValues, heads: &'a [QueryOperands]) -> Self {
        let (len, dim) = (kv.k.rows.len, kv.k.rows.dim);
        let largest = |operand: &super::Codes| {
            let blocks = 0..len.div_ceil(PAD);
            blocks.map(|block| operand.fold(block)).max().unwrap_or(0)
        };
        Self {
            scheme,
            k: kv.k.dequantize(),
            q: heads.iter().map(|head| head.q.dequantize()).collect(),
            heads,
            dq: heads.iter().map(|_| Rows::zeros(len, dim)).collect(),
            key_exponent: largest(&kv.v) + largest(&kv.k),
            part: vec![0.0; PAD * dim],
        }
    }

    /// Adds what a step of queries of head `head` and the key tile from `key` on give one another. `ds` is of
    /// BF16 values, `dk` the tile's.
    #[inline(always)]
    pub fn add<G: Gemm>(
        &mut self,
        head: usize,
        ds: &[f32],
        blocks: &Blocks,
        key: usize,
        dk: &mut [f32],
    ) {
        for (block, ds) in blocks.iter().zip(ds.chunks_exact(PAD * TILE)) {
            let Some(block) = block else { continue };
            let dim = self.k.dim;
            self.part.fill(0.0);
            let shape = Shape::of_rows(PAD, block.width, dim);
            let k = self.k.from(block.key);
            G::accumulate(&mut self.part, Operand::rows(ds, TILE), k, shape);
            let (a, q) = (Operand::transposed(ds, TILE), self.q[head].from(block.row));
            let shape = Shape::of_rows(block.width, PAD, dim);
            G::accumulate(&mut dk[(block.key - key) * dim..], a, q, shape);
            let up = pow2(self.exponent(head, block.row / PAD));
            let dq = &mut self.dq[head].data[block.row * dim..][..PAD * dim];
            for (dq, part) in dq.iter_mut().zip(&self.part) {
                let part = part * up;
                *dq = match self.scheme.dq {
                    DqAccumulator::Fp32 => *dq + part,
                    _ => round_f16(*dq + round_f16(part)),
                };
            }
        }
    }

    /// The power of two on the sums of a block of queries, so that FP16 never overflows.
    ///
    /// |dQ| is at most Σ |dS| |K|, dS = P ∘ (dP - D), where |dP| is at most ‖dO‖ max‖V‖, |D| at most twice
    /// that (P inside O is rounded), and rounding dS at most doubles it; the P of a row sum to 1. That
    /// is under 8 ‖dO‖ max‖V‖ max|K|, and a norm is at most √dim · 448 · 2^exponent.
    fn exponent(&self, head: usize, block: usize) -> i32 {
        if self.scheme.dq == DqAccumulator::Fp32 {
            return 0;
        }
        let dim = self.k.dim.ilog2() as i32;
        // 448³ < 2^27; what is left is 2^15, half of FP16's range.
        let largest = 3 + dim + 27 + self.heads[head].d_o.fold(block) + self.key_exponent;
        (15 - largest).clamp(-126, 126)
    }

    /// dQ as [`KeyGradients`](super::keys::KeyGradients) has dK.
    pub fn finish(mut self) -> Vec<Rows<f32>> {
        for head in 0..self.heads.len() {
            let dim = self.dq[head].dim;
            for block in 0..self.dq[head].data.len() / (PAD * dim) {
                let unscale = pow2(-self.exponent(head, block));
                let rows = &mut self.dq[head].data[block * PAD * dim..][..PAD * dim];
                rows.iter_mut().for_each(|x| *x *= unscale);
            }
        }
        self.dq
    }
}
