//! Kernel A of the `hopper` backward pass: dK and dV of one key/value head; in the one-kernel form, dQ of
//! its query heads as well.

use std::ops::Range;

use flamia_format::exponent::pow2;
use flamia_sched::{Mask, TILE};

use super::accumulator::HopperMma;
use super::fused::FusedGradients;
use super::recompute::{Gradients, recompute};
use super::reference::Reference;
use super::{Hopper, KeysValues, QueryOperands};
use crate::cpu::block::Block;
use crate::cpu::gemm::{Gemm, Operand, PAD, Shape};
use crate::cpu::low_bit::{count_nonzero, round_codes};
use crate::cpu::operands::Rows;
use crate::cpu::real::Real;
use crate::cpu::simd::Task;
use crate::options::{BackwardForm, MmaAccumulator};
use crate::stats::StatsSnapshot;

/// Queries per step; running references move once per step.
pub(super) const QUERIES: usize = 64;

/// A key/value head of one document with the query heads that share it.
pub(super) struct KeyHead<'a> {
    pub scheme: &'a Hopper,
    pub kv: &'a KeysValues,
    /// The query heads of the group, ascending.
    pub heads: &'a [QueryOperands],
    pub mask: Mask,
    /// Softmax scale.
    pub scale: f64,
}

/// dK (without the softmax scale, not rotated back) and dV, padded to whole token blocks.
pub(super) struct KeyGradients {
    pub dk: Rows<f32>,
    pub dv: Rows<f32>,
    /// In the one-kernel form, dQ of each query head as [`dk`](Self::dk) is.
    pub dq: Option<Vec<Rows<f32>>>,
    pub counts: StatsSnapshot,
}

impl Task for KeyHead<'_> {
    type Output = KeyGradients;

    #[inline(always)]
    fn run<G: Gemm>(self) -> KeyGradients {
        match self.scheme.accumulator {
            MmaAccumulator::Fp32 => self.gradients::<G, G>(),
            // That of its FP8 products; those of BF16 keep FP32's bits.
            MmaAccumulator::Hopper => self.gradients::<HopperMma, G>(),
        }
    }
}

impl KeyHead<'_> {
    #[inline(always)]
    fn gradients<G: Gemm, Bf16: Gemm>(self) -> KeyGradients {
        let (len, dim) = (self.kv.k.rows.len, self.kv.k.rows.dim);
        let [mut dk, mut dv] = std::array::from_fn(|_| Rows::zeros(len, dim));
        let mut counts = StatsSnapshot::default();
        let mut p = vec![0.0; QUERIES * TILE];
        let mut ds = vec![0.0; QUERIES * TILE];
        let mut fused = (self.scheme.backward == BackwardForm::OneKernel)
            .then(|| FusedGradients::new(self.scheme, self.kv, self.heads));
        let gradients = match fused {
            Some(_) => Gradients::Bf16,
            None => Gradients::Fp32,
        };

        let tiles = dk
            .data
            .chunks_mut(TILE * dim)
            .zip(dv.data.chunks_mut(TILE * dim));
        for (tile, (dk, dv)) in tiles.enumerate() {
            let keys = tile * TILE..len.min((tile + 1) * TILE);
            let mut dv = ValueAccumulator {
                dv,
                key: keys.start,
                dim,
                references: [None; TILE / PAD],
            };
            let mut dk = KeyAccumulator {
                dk,
                key: keys.start,
                dim,
                references: [Reference::default(); TILE],
            };
            for (number, head) in self.heads.iter().enumerate() {
                for row in (0..len).step_by(QUERIES) {
                    let blocks = self.blocks(row, &keys, len);
                    for (block, (p, ds)) in blocks.iter().zip(
                        p.chunks_exact_mut(PAD * TILE)
                            .zip(ds.chunks_exact_mut(PAD * TILE)),
                    ) {
                        p.fill(0.0);
                        ds.fill(0.0);
                        if let Some(block) = block {
                            recompute::<G>(p, ds, block, self.kv, head, self.scale, gradients);
                        }
                    }
                    counts.saturated += dv.add::<G>(&mut p, &blocks, head);
                    match &mut fused {
                        Some(fused) => {
                            fused.add::<Bf16>(number, &ds, &blocks, keys.start, dk.dk);
                        }
                        None => {
                            counts += dk.add::<G>(&mut ds, &blocks, head, self.scheme.hysteresis);
                        }
                    }
                }
            }
            if fused.is_none() {
                dk.finish();
            }
            dv.finish();
        }
        KeyGradients {
            dk,
            dv,
            dq: fused.map(FusedGradients::finish),
            counts,
        }
    }

    #[inline(always)]
    fn blocks(&self, row: usize, keys: &Range<usize>, len: usize) -> Blocks {
        std::array::from_fn(|i| {
            let row = row + i * PAD;
            if row < len {
                Block::new(row, keys, len, self.mask)
            } else {
                None
            }
        })
    }
}

/// The blocks of a step; `None` for one that sees none of the keys.
pub(super) type Blocks = [Option<Block>; QUERIES / PAD];

/// dV of a key tile in units of 2^(8 + reference).
struct ValueAccumulator<'a> {
    dv: &'a mut [f32],
    /// The tile's first key.
    key: usize,
    dim: usize,
    /// The largest exponent of dO met so far. Per key row in principle; the rows of one token block
    /// see the same query blocks, so one entry serves them all.
    references: [Option<i32>; TILE / PAD],
}

impl ValueAccumulator<'_> {
    /// Adds P · 2^(8 + eO - R), rounded, against the codes of dO. P is at most 1, so R >= eO alone
    /// keeps the codes in range. Returns how many were clamped all the same.
    #[inline(always)]
    fn add<G: Gemm>(&mut self, p: &mut [f32], blocks: &Blocks, head: &QueryOperands) -> u64 {
        let mut clamped = 0;
        for block in blocks.iter().flatten() {
            let Some(exponent) = head.d_o.exponent(block.row / PAD) else {
                continue;
            };
            let first = (block.key - self.key) / PAD;
            let rows = self.dv.chunks_mut(PAD * self.dim).skip(first);
            let seen = &mut self.references[first..][..block.width / PAD];
            for (reference, rows) in seen.iter_mut().zip(rows) {
                match *reference {
                    Some(current) if current >= exponent => {}
                    Some(current) => {
                        rows.iter_mut().for_each(|x| *x *= pow2(current - exponent));
                        *reference = Some(exponent);
                    }
                    None => *reference = Some(exponent),
                }
            }
        }
        for (block, p) in blocks.iter().zip(p.chunks_exact_mut(PAD * TILE)) {
            let Some(block) = block else { continue };
            let exponent = head.d_o.exponent(block.row / PAD);
            let first = (block.key - self.key) / PAD;
            let scales = self
                .references
                .map(|reference| match (exponent, reference) {
                    (Some(exponent), Some(reference)) => pow2(8 + exponent - reference),
                    // The codes of dO are all zero, or all NaN.
                    _ => 0.0,
                });
            for row in p.chunks_exact_mut(TILE) {
                let row = &mut row[..block.width];
                for (p, scale) in row.chunks_exact_mut(PAD).zip(&scales[first..]) {
                    p.iter_mut().for_each(|p| *p *= *scale);
                }
                clamped += round_codes(row);
            }
            let (a, b) = (Operand::transposed(p, TILE), head.d_o.rows.from(block.row));
            let dv = &mut self.dv[first * PAD * self.dim..];
            G::accumulate(dv, a, b, Shape::of_rows(block.width, PAD, self.dim));
        }
        clamped
    }

    #[inline(always)]
    fn finish(self) {
        for (rows, reference) in self.dv.chunks_mut(PAD * self.dim).zip(self.references) {
            if let Some(reference) = reference {
                rows.iter_mut().for_each(|x| *x *= pow2(reference - 8));
            }
        }
    }
}

/// dK of a key tile, each row in units of its reference.
struct KeyAccumulator<'a> {
    dk: &'a mut [f32],
    /// The tile's first key.
    key: usize,
    dim: usize,
    references: [Reference; TILE],
}

impl KeyAccumulator<'_> {
    /// Adds dS · 2^eQ, rounded relative to each key row's reference, against the codes of Q.
    #[inline(always)]
    fn add<G: Gemm>(
        &mut self,
        ds: &mut [f32],
        blocks: &Blocks,
        head: &QueryOperands,
        hysteresis: i32,
    ) -> StatsSnapshot {
        let mut counts = StatsSnapshot::default();
        let mut amax = [0.0f32; TILE];
        for (block, ds) in blocks.iter().zip(ds.chunks_exact_mut(PAD * TILE)) {
            let Some(block) = block else { continue };
            let scale = head.q.scale(block.row / PAD);
            for row in ds.chunks_exact_mut(TILE) {
                counts.ds_nonzero += count_nonzero(&row[..block.width]);
                for (ds, amax) in row.iter_mut().zip(&mut amax[block.key - self.key..]) {
                    *ds *= scale;
                    *amax = Real::max(ds.abs(), *amax);
                }
            }
        }
        let mut down = [0.0f32; TILE];
        for (i, (reference, row)) in self
            .references
            .iter_mut()
            .zip(self.dk.chunks_exact_mut(self.dim))
            .enumerate()
        {
            let factor = reference.update(amax[i], hysteresis);
            if factor != 1.0 {
                row.iter_mut().for_each(|x| *x *= factor);
            }
            down[i] = reference.down();
        }
        let mut kept = 0;
        for (block, ds) in blocks.iter().zip(ds.chunks_exact_mut(PAD * TILE)) {
            let Some(block) = block else { continue };
            for row in ds.chunks_exact_mut(TILE) {
                let row = &mut row[..block.width];
                for (ds, down) in row.iter_mut().zip(&down[block.key - self.key..]) {
                    *ds *= *down;
                }
                counts.saturated += round_codes(row);
                kept += count_nonzero(row);
            }
            let (a, b) = (Operand::transposed(ds, TILE), head.q.rows.from(block.row));
            let dk = &mut self.dk[(block.key - self.key) * self.dim..];
            G::accumulate(dk, a, b, Shape::of_rows(block.width, PAD, self.dim));
        }
        counts.ds_flushed = counts.ds_nonzero - kept;
        counts
    }

    #[inline(always)]
    fn finish(self) {
        for (row, reference) in self.dk.chunks_exact_mut(self.dim).zip(&self.references) {
            row.iter_mut().for_each(|x| *x *= reference.up());
        }
    }
}
