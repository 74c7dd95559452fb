//! dS as dQ and dK read it.

use flamia_format::ue8m0::Ue8m0;
use flamia_format::{
    Element, quantize_square_in_place, random, round_columns, round_columns_stochastic, round_group,
};
use flamia_sched::TILE;

use super::{LowBit, count_nonzero, fold_queries};
use crate::cpu::block::Block;
use crate::cpu::gemm::PAD;
use crate::cpu::scheme::{Folds, SoftmaxGradients};
use crate::options::DsExponent;
use crate::stats::StatsSnapshot;

impl LowBit {
    #[inline(always)]
    pub(super) fn round_softmax_gradients(
        &self,
        gradients: SoftmaxGradients<f32>,
        block: &Block,
        folds: Folds<f32>,
        head: usize,
    ) -> (bool, StatsSnapshot) {
        let SoftmaxGradients { ds, for_dk } = gradients;
        let width = block.width;
        let square = self.ds == Element::E4M3 && self.ds_exponent == DsExponent::Square;
        let separate = !square || folds.k.is_some() || folds.q.is_some();
        if separate {
            for (to, from) in for_dk.chunks_exact_mut(TILE).zip(ds.chunks_exact(TILE)) {
                to[..width].copy_from_slice(&from[..width]);
            }
        }

        let mut counts = count(ds, width, |ds| {
            if let Some(fold) = folds.k {
                for (i, row) in ds.chunks_exact_mut(TILE).enumerate() {
                    let seen = block.visible(i);
                    let factors = &fold.factors[block.key..][seen.clone()];
                    for (ds, factor) in row[seen].iter_mut().zip(factors) {
                        *ds *= factor;
                    }
                }
            }
            if square {
                self.round_squares(ds, width);
            } else {
                for row in ds.chunks_exact_mut(TILE) {
                    for group in row[..width].chunks_exact_mut(PAD) {
                        round_group(group, self.ds, self.rule);
                    }
                }
            }
        });
        if separate {
            counts += count(for_dk, width, |ds| {
                if let Some(fold) = folds.q {
                    fold_queries(ds, block, fold);
                }
                if square {
                    self.round_squares(ds, width);
                } else {
                    self.round_for_dk(ds, block, head);
                }
            });
        }
        (separate, counts)
    }

    #[inline(always)]
    fn round_squares(&self, ds: &mut [f32], width: usize) {
        for col in (0..width).step_by(PAD) {
            quantize_square_in_place(&mut ds[col..], PAD, PAD, TILE, self.rule);
        }
    }

    /// One exponent per key and 32 queries.
    #[inline(always)]
    fn round_for_dk(&self, ds: &mut [f32], block: &Block, head: usize) {
        let mut exponents = [Ue8m0::ZERO_BLOCK; TILE];
        let exponents = &mut exponents[..block.width];
        match self.stochastic {
            None => round_columns(ds, PAD, block.width, TILE, self.ds, self.rule, exponents),
            Some(seed) => {
                let half = |i: u64| u64::from(random::bits(seed, 2 * head as u64 + i));
                let seed = half(0) << 32 | half(1);
                // Places count from the document's start, so that its neighbours do not show.
                let random = |row: usize, col: usize| {
                    let (query, key) = (block.row + row, block.key + col);
                    random::bits(seed, (query as u64) << 32 | key as u64)
                };
                round_columns_stochastic(ds, PAD, block.width, TILE, self.rule, exponents, random);
            }
        }
    }
}

/// Counts what `round` makes zero.
#[inline(always)]
fn count(ds: &mut [f32], width: usize, round: impl FnOnce(&mut [f32])) -> StatsSnapshot {
    let nonzero = |ds: &[f32]| -> u64 {
        ds.chunks_exact(TILE)
            .map(|row| count_nonzero(&row[..width]))
            .sum()
    };
    let before = nonzero(ds);
    round(ds);
    StatsSnapshot {
        ds_nonzero: before,
        ds_flushed: before - nonzero(ds),
        saturated: 0,
    }
}
