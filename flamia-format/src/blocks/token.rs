//! Token blocks: 32 rows and all columns share one exponent.

use super::{BLOCK, BlockScale, amax_bits};
use crate::e4m3::{self, E4M3};
use crate::exponent::{Element, ExponentRule};
use crate::ue8m0::Ue8m0;

/// One document's row-major `[rows, cols]` matrix as E4M3 codes with one exponent per 32 rows.
///
/// The exponent is constant along the columns and per block along the rows, so that the same codes
/// serve contractions over either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBlocks {
    /// Tokens.
    pub rows: usize,
    /// Values per token.
    pub cols: usize,
    /// Codes, row-major `[rows, cols]`.
    pub codes: Vec<E4M3>,
    /// Exponents, `[ceil(rows / 32)]`; the last one may cover fewer rows.
    pub exponents: Vec<Ue8m0>,
}

impl TokenBlocks {
    /// Quantises one document. Blocks are counted from its first row, so `x` must not hold rows of
    /// another one.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows of `cols` values.
    pub fn quantize(x: &[f32], cols: usize, rule: ExponentRule) -> Self {
        let rows = whole_rows(x.len(), cols);
        let mut codes = vec![E4M3::ZERO; x.len()];
        let mut exponents = Vec::with_capacity(rows.div_ceil(BLOCK));
        let block = block_len(cols);
        for (values, codes) in x.chunks(block).zip(codes.chunks_mut(block)) {
            let scale = BlockScale::new(amax_bits(values), Element::E4M3, rule);
            scale.encode(values, codes);
            exponents.push(scale.exponent());
        }
        Self {
            rows,
            cols,
            codes,
            exponents,
        }
    }

    /// The values that the codes stand for, row-major `[rows, cols]`.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.codes.len());
        for (codes, exponent) in self.codes.chunks(block_len(self.cols)).zip(&self.exponents) {
            let up = exponent.to_f32();
            values.extend(codes.iter().map(|code| code.to_f32() * up));
        }
        values
    }

    /// The dense table from which the scale factors of any tile of rows are taken: `[rows, groups]`
    /// bytes, every token's exponent `groups` times, once for each group of a contraction over the
    /// columns. [`to_atoms`](crate::layout::to_atoms) makes a tile of it.
    pub fn token_table(&self, groups: usize) -> Vec<u8> {
        (0..self.rows)
            .flat_map(|row| std::iter::repeat_n(self.exponents[row / BLOCK].0, groups))
            .collect()
    }
}

/// Replaces one document's row-major `[rows, cols]` matrix by what [`TokenBlocks::quantize`] and
/// then [`TokenBlocks::dequantize`] give, bit for bit, and stores the exponents.
///
/// # Panics
/// If `x` is not a whole number of rows of `cols` values, or `exponents` does not hold one entry
/// per 32 rows, the last block counted even if it is short.
#[inline(always)]
pub fn quantize_token_blocks_in_place(
    x: &mut [f32],
    cols: usize,
    rule: ExponentRule,
    exponents: &mut [Ue8m0],
) {
    let blocks = whole_rows(x.len(), cols).div_ceil(BLOCK);
    assert_eq!(exponents.len(), blocks, "one exponent per {BLOCK} rows");
    for (values, exponent) in x.chunks_mut(block_len(cols)).zip(exponents) {
        let scale = BlockScale::new(amax_bits(values), Element::E4M3, rule);
        scale.round(values, e4m3::round);
        *exponent = scale.exponent();
    }
}

#[inline(always)]
fn whole_rows(len: usize, cols: usize) -> usize {
    assert!(
        cols > 0 && len.is_multiple_of(cols),
        "{len} values are no whole number of rows of {cols}"
    );
    len / cols
}

#[inline(always)]
fn block_len(cols: usize) -> usize {
    BLOCK.saturating_mul(cols)
}
