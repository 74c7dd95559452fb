//! Forward pass of the `hopper` profile: one query tile.

use std::ops::Range;

use flamia_format::exponent::pow2;
use flamia_sched::{Mask, TILE, key_tiles};

use super::accumulator::HopperMma;
use super::{Codes, Hopper, KeysValues};
use crate::cpu::block::Block;
use crate::cpu::forward::TileOutput;
use crate::cpu::gemm::{Gemm, Operand, PAD, Shape};
use crate::cpu::low_bit::{round_bf16, round_codes};
use crate::cpu::real::{exp2_f32, lane_sum};
use crate::cpu::simd::Task;
use crate::cpu::softmax::{SoftmaxRow, Sums, fill_outside, largest};
use crate::options::MmaAccumulator;

/// A query tile of one head and all that it reads.
pub(super) struct QueryTile<'a> {
    pub scheme: &'a Hopper,
    pub q: &'a Codes,
    pub kv: &'a KeysValues,
    /// Rows of the tile, counted from the document's start.
    pub queries: Range<usize>,
    pub mask: Mask,
    /// Softmax scale times log2(e).
    pub scale: f32,
}

impl Task for QueryTile<'_> {
    type Output = TileOutput<f32>;

    #[inline(always)]
    fn run<G: Gemm>(self) -> TileOutput<f32> {
        match self.scheme.accumulator {
            MmaAccumulator::Fp32 => self.attend::<G>(),
            MmaAccumulator::Hopper => self.attend::<HopperMma>(),
        }
    }
}

impl QueryTile<'_> {
    #[inline(always)]
    fn attend<G: Gemm>(self) -> TileOutput<f32> {
        let (len, dim) = (self.q.rows.len, self.q.rows.dim);
        let Hopper {
            c,
            tau,
            normalises_rounded,
            ..
        } = *self.scheme;
        let mut output = TileOutput::new(self.queries.len(), dim);
        let mut p = vec![0.0; PAD * TILE];
        let mut tile_o = vec![0.0; PAD * dim];
        // What P V of each row is multiplied with, so that its weights are as heavy rounded as before.
        let mut make_up = [1.0; PAD];

        for (i, o) in output.o.chunks_exact_mut(PAD * dim).enumerate() {
            let row = self.queries.start + i * PAD;
            let q_scale = self.scale * self.q.scale(row / PAD);
            // `max` is the reference over z = x + (exponent of V's block): an integer.
            let mut softmax = [SoftmaxRow::<f32>::START; PAD];

            for tile in key_tiles(len, self.queries.clone(), self.mask) {
                let Some(block) = Block::new(row, &tile.range, len, self.mask) else {
                    continue;
                };
                let width = block.width;
                self.kv.k_panels.scores::<G>(
                    &mut p,
                    TILE,
                    self.q.rows.operand(row),
                    block.key,
                    width,
                );

                for (i, (softmax, make_up)) in softmax.iter_mut().zip(&mut make_up).enumerate() {
                    let p = &mut p[i * TILE..][..width];
                    let visible = block.visible(i);
                    *make_up = 1.0;
                    if visible.is_empty() {
                        p.fill(0.0);
                        continue;
                    }
                    for (group, s) in p.chunks_exact_mut(PAD).enumerate() {
                        let group = block.key / PAD + group;
                        let scale = q_scale * self.kv.k.scale(group);
                        let fold = self.kv.v.fold(group) as f32;
                        for s in s {
                            *s = s.mul_add(scale, fold);
                        }
                    }
                    fill_outside(p, &visible, f32::NEG_INFINITY);
                    let max = largest(p);
                    if max > softmax.max + tau {
                        softmax.rescale(max.ceil(), &mut o[i * dim..][..dim]);
                    }
                    let mut folded = 0.0;
                    for (group, p) in p.chunks_exact_mut(PAD).enumerate() {
                        for p in p.iter_mut() {
                            *p = exp2_f32((*p - softmax.max) + c);
                        }
                        let in_group = lane_sum(p.iter().copied());
                        folded += in_group;
                        // The row sum takes the fold out again.
                        let unfold = pow2(-self.kv.v.fold(block.key / PAD + group));
                        softmax.add(Sums::unrounded(unfold * in_group));
                    }
                    output.saturated += round_codes(p);
                    if normalises_rounded {
                        let rounded = G::row_sum(p);
                        *make_up = if rounded == 0.0 {
                            1.0
                        } else {
                            folded / rounded
                        };
                    }
                }

                // A fresh accumulator per tile, promoted into FP32.
                tile_o.fill(0.0);
                let v = self.kv.v.rows.from(block.key);
                let shape = Shape::of_rows(PAD, width, dim);
                G::accumulate(&mut tile_o, Operand::rows(&p, TILE), v, shape);
                let rows = o.chunks_exact_mut(dim).zip(tile_o.chunks_exact(dim));
                for ((o, tile), make_up) in rows.zip(&make_up) {
                    for (o, tile) in o.iter_mut().zip(tile) {
                        *o = tile.mul_add(*make_up, *o);
                    }
                }
            }

            let lse = &mut output.lse[i * PAD..][..PAD];
            for ((softmax, o), lse) in softmax.iter().zip(o.chunks_exact_mut(dim)).zip(lse) {
                *lse = softmax.finish(o, c);
            }
            round_bf16(o);
        }
        output
    }
}
