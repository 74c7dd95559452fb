//! Forward pass of `reference` and of the block-scaled paths: one query tile.

use std::ops::Range;

use flamia_sched::{Mask, TILE, key_tiles};

use super::backward::KeysValues;
use super::block::Block;
use super::gemm::{Gemm, Operand, PAD, Shape};
use super::operands::Prepared;
use super::real::Real;
use super::scheme::{BlockScheme, Pass};
use super::simd::Task;
use super::softmax::SoftmaxRow;

/// A query tile of one head and all that it reads.
pub(crate) struct QueryTile<'a, S: BlockScheme> {
    pub scheme: &'a S,
    pub q: &'a Prepared<S::Real>,
    pub kv: &'a KeysValues<S::Real>,
    /// Rows of the tile, counted from the document's start.
    pub queries: Range<usize>,
    pub mask: Mask,
    /// Softmax scale times log2(e): scores are in base 2.
    pub scale: S::Real,
}

/// The results of a query tile, padded to whole token blocks.
pub struct TileOutput<R> {
    /// `[rows, head_dim]`.
    pub o: Vec<R>,
    /// Natural logarithm, +∞ for a row that sees no key.
    pub lse: Vec<R>,
    /// Probabilities that were clamped.
    pub saturated: u64,
}

impl<R: Real> TileOutput<R> {
    pub fn new(rows: usize, dim: usize) -> Self {
        let padded = rows.next_multiple_of(PAD);
        Self {
            o: vec![R::ZERO; padded * dim],
            lse: vec![R::INFINITY; padded],
            saturated: 0,
        }
    }
}

impl<S: BlockScheme> Task for QueryTile<'_, S> {
    type Output = TileOutput<S::Real>;

    #[inline(always)]
    fn run<G: Gemm>(self) -> Self::Output {
        let q = &self.q.dim;
        let (len, dim) = (q.len, q.dim);
        let (c, tau) = (self.scheme.c(), self.scheme.tau());
        let mut output = TileOutput::new(self.queries.len(), dim);
        let mut p = vec![S::Real::ZERO; PAD * TILE];

        for (i, o) in output.o.chunks_exact_mut(PAD * dim).enumerate() {
            let row = self.queries.start + i * PAD;
            let mut softmax = [SoftmaxRow::<S::Real>::START; PAD];

            for tile in key_tiles(len, self.queries.clone(), self.mask) {
                let Some(block) = Block::new(row, &tile.range, len, self.mask) else {
                    continue;
                };
                let width = block.width;
                let k = &self.kv.k_panels;
                k.scores::<G>(&mut p, TILE, q.operand(row), block.key, width);
                let per_key = self
                    .scheme
                    .per_key(Pass::Forward, self.mask, row, block.key);
                let (v, fold) = self.kv.v.over_tokens(per_key);
                let fold = fold.map(|fold| (fold, block.key));

                for (i, softmax) in softmax.iter_mut().enumerate() {
                    let p = &mut p[i * TILE..][..width];
                    let visible = block.visible(i);
                    if visible.is_empty() {
                        p.fill(S::Real::ZERO);
                        continue;
                    }
                    let max = softmax.scale_scores(p, &visible, self.scale);
                    // Per row: a later row of the tile must not change when an earlier one rescales.
                    if max > softmax.max + tau {
                        let reference = self.scheme.reference(max);
                        softmax.rescale(reference, &mut o[i * dim..][..dim]);
                    }
                    let (sums, clamped) = self.scheme.probabilities(p, softmax.max, &visible, fold);
                    softmax.add(sums);
                    output.saturated += clamped;
                }
                let shape = Shape::of_rows(PAD, width, dim);
                G::accumulate(o, Operand::rows(&p, TILE), v.from(block.key), shape);
            }

            let lse = &mut output.lse[i * PAD..][..PAD];
            for ((softmax, o), lse) in softmax.iter().zip(o.chunks_exact_mut(dim)).zip(lse) {
                *lse = softmax.finish(o, c);
            }
            self.scheme.round_output(o);
        }
        output
    }
}
