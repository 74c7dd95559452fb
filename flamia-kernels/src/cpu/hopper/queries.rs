//! Kernel B of the `hopper` backward pass: dQ of one query head.

use flamia_sched::{Mask, TILE, key_tiles, query_tiles};

use super::accumulator::HopperMma;
use super::recompute::{Gradients, recompute};
use super::reference::Reference;
use super::{Hopper, KeysValues, QueryOperands};
use crate::cpu::block::Block;
use crate::cpu::gemm::{Gemm, Operand, PAD, Shape};
use crate::cpu::low_bit::{count_nonzero, round_codes};
use crate::cpu::operands::Rows;
use crate::cpu::real::Real;
use crate::cpu::simd::Task;
use crate::options::MmaAccumulator;
use crate::stats::StatsSnapshot;

/// A query head of one document.
pub(super) struct QueryHead<'a> {
    pub scheme: &'a Hopper,
    pub kv: &'a KeysValues,
    pub head: &'a QueryOperands,
    pub mask: Mask,
    /// Softmax scale.
    pub scale: f64,
}

/// dQ without the softmax scale, not rotated back, padded to whole token blocks.
pub(super) struct QueryGradients {
    pub dq: Rows<f32>,
    pub counts: StatsSnapshot,
}

impl Task for QueryHead<'_> {
    type Output = QueryGradients;

    #[inline(always)]
    fn run<G: Gemm>(self) -> QueryGradients {
        match self.scheme.accumulator {
            MmaAccumulator::Fp32 => self.gradients::<G>(),
            MmaAccumulator::Hopper => self.gradients::<HopperMma>(),
        }
    }
}

impl QueryHead<'_> {
    #[inline(always)]
    fn gradients<G: Gemm>(self) -> QueryGradients {
        let (len, dim) = (self.head.q.rows.len, self.head.q.rows.dim);
        let mut dq = Rows::zeros(len, dim);
        let mut counts = StatsSnapshot::default();
        let mut p = vec![0.0; PAD * TILE];
        let mut ds = vec![0.0; PAD * TILE];

        for queries in query_tiles(len) {
            for row in queries.clone().step_by(PAD) {
                let dq = &mut dq.data[row * dim..][..PAD * dim];
                let mut references = [Reference::default(); PAD];
                for tile in key_tiles(len, queries.clone(), self.mask) {
                    let Some(block) = Block::new(row, &tile.range, len, self.mask) else {
                        continue;
                    };
                    recompute::<G>(
                        &mut p,
                        &mut ds,
                        &block,
                        self.kv,
                        self.head,
                        self.scale,
                        Gradients::Fp32,
                    );
                    for (i, reference) in references.iter_mut().enumerate() {
                        let ds = &mut ds[i * TILE..][..block.width];
                        let dq = &mut dq[i * dim..][..dim];
                        counts += self.round(ds, &block, reference, dq);
                    }
                    let k = self.kv.k.rows.from(block.key);
                    let ds = Operand::rows(&ds, TILE);
                    let shape = Shape::of_rows(PAD, block.width, dim);
                    G::accumulate(dq, ds, k, shape);
                }
                for (reference, dq) in references.iter().zip(dq.chunks_exact_mut(dim)) {
                    dq.iter_mut().for_each(|x| *x *= reference.up());
                }
            }
        }
        QueryGradients { dq, counts }
    }

    /// Folds the exponents of K into one row of dS and rounds it relative to the row's reference,
    /// with which `dq` is rescaled.
    #[inline(always)]
    fn round(
        &self,
        ds: &mut [f32],
        block: &Block,
        reference: &mut Reference,
        dq: &mut [f32],
    ) -> StatsSnapshot {
        let nonzero = count_nonzero(ds);
        let mut amax = 0.0f32;
        for (group, ds) in ds.chunks_exact_mut(PAD).enumerate() {
            let scale = self.kv.k.scale(block.key / PAD + group);
            for ds in ds {
                *ds *= scale;
                amax = Real::max(ds.abs(), amax);
            }
        }
        let factor = reference.update(amax, self.scheme.hysteresis);
        if factor != 1.0 {
            dq.iter_mut().for_each(|x| *x *= factor);
        }
        let down = reference.down();
        ds.iter_mut().for_each(|x| *x *= down);
        let saturated = round_codes(ds);
        StatsSnapshot {
            ds_nonzero: nonzero,
            ds_flushed: nonzero - count_nonzero(ds),
            saturated,
        }
    }
}
