//! dQ of the one-kernel form of the `hopper` backward pass: each key tile's part of it, from the same dS
//! as dK, added up in FP16 or FP32.

use flamia_format::exponent::pow2;
use flamia_sched::TILE;

use super::keys::{Blocks, QUERIES};
use super::reference::Reference;
use super::{Hopper, KeysValues, QueryOperands};
use crate::cpu::f16::round_f16;
use crate::cpu::gemm::{Gemm, Operand, PAD, Shape};
use crate::cpu::low_bit::{count_nonzero, round_codes};
use crate::cpu::operands::Rows;
use crate::cpu::real::Real;
use crate::options::DqAccumulator;
use crate::stats::StatsSnapshot;

/// dQ of all query heads of a key/value head.
pub(super) struct QuerySums<'a> {
    scheme: &'a Hopper,
    kv: &'a KeysValues,
    heads: &'a [QueryOperands],
    dq: Vec<Rows<f32>>,
    /// The largest exponents of V and of K together.
    key_exponent: i32,
    /// For each block of a step, since a product reads dS of all keys of a tile.
    references: [Reference; QUERIES / PAD],
    codes: Vec<f32>,
    part: Vec<f32>,
    counts: StatsSnapshot,
}

impl<'a> QuerySums<'a> {
    pub fn new(scheme: &'a Hopper, kv: &'a KeysValues, heads: &'a [QueryOperands]) -> Self {
        let (len, dim) = (kv.k.rows.len, kv.k.rows.dim);
        let largest = |operand: &super::Codes| {
            let blocks = 0..len.div_ceil(PAD);
            blocks.map(|block| operand.fold(block)).max().unwrap_or(0)
        };
        Self {
            scheme,
            kv,
            heads,
            dq: heads.iter().map(|_| Rows::zeros(len, dim)).collect(),
            key_exponent: largest(&kv.v) + largest(&kv.k),
            references: Default::default(),
            codes: vec![0.0; QUERIES * TILE],
            part: vec![0.0; PAD * dim],
            counts: StatsSnapshot::default(),
        }
    }

    /// The next key tile, with references of its own.
    pub fn start_tile(&mut self) {
        self.references = Default::default();
    }

    /// Adds what a step of queries of head `head` gets from the key tile. `ds` is as kernel A has it.
    #[inline(always)]
    pub fn add<G: Gemm>(&mut self, head: usize, ds: &[f32], blocks: &Blocks) {
        let kv = self.kv;
        let exponents =
            blocks.map(|block| block.map_or(0, |block| self.exponent(head, block.row / PAD)));
        self.codes.copy_from_slice(ds);
        let codes = self.codes.chunks_exact_mut(PAD * TILE);
        let parts = blocks.iter().zip(exponents).zip(&mut self.references);
        for (((block, exponent), reference), codes) in parts.zip(codes) {
            let Some(block) = block else { continue };
            let mut amax = 0.0f32;
            for row in codes.chunks_exact_mut(TILE) {
                let row = &mut row[..block.width];
                self.counts.ds_nonzero += count_nonzero(row);
                for (group, ds) in row.chunks_exact_mut(PAD).enumerate() {
                    let scale = kv.k.scale(block.key / PAD + group);
                    for ds in ds {
                        *ds *= scale;
                        amax = Real::max(ds.abs(), amax);
                    }
                }
            }
            // Parts are whole before they are added: what the reference was is no matter.
            reference.update(amax, self.scheme.hysteresis);
            let (down, up) = (reference.down(), reference.up());
            for row in codes.chunks_exact_mut(TILE) {
                let row = &mut row[..block.width];
                let nonzero = count_nonzero(row);
                row.iter_mut().for_each(|ds| *ds *= down);
                self.counts.saturated += round_codes(row);
                self.counts.ds_flushed += nonzero - count_nonzero(row);
            }
            let dim = kv.k.rows.dim;
            self.part.fill(0.0);
            let shape = Shape::of_rows(PAD, block.width, dim);
            let k = kv.k.rows.from(block.key);
            G::accumulate(&mut self.part, Operand::rows(codes, TILE), k, shape);
            let dq = &mut self.dq[head].data[block.row * dim..][..PAD * dim];
            for (dq, part) in dq.iter_mut().zip(&self.part) {
                let part = part * (up * pow2(exponent));
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
        let dim = self.kv.k.rows.dim.ilog2() as i32;
        // 448³ < 2^27; what is left is 2^15, half of FP16's range.
        let largest = 3 + dim + 27 + self.heads[head].d_o.fold(block) + self.key_exponent;
        (15 - largest).clamp(-126, 126)
    }

    /// dQ as [`KeyGradients`](super::keys::KeyGradients) has dK.
    pub fn finish(mut self) -> (Vec<Rows<f32>>, StatsSnapshot) {
        for head in 0..self.heads.len() {
            let dim = self.dq[head].dim;
            for block in 0..self.dq[head].data.len() / (PAD * dim) {
                let unscale = pow2(-self.exponent(head, block));
                let rows = &mut self.dq[head].data[block * PAD * dim..][..PAD * dim];
                rows.iter_mut().for_each(|x| *x *= unscale);
            }
        }
        (self.dq, self.counts)
    }
}
