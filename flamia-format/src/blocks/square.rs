//! Square blocks: 32 rows by 32 columns share one exponent.

use super::{BLOCK, BlockScale, amax_bits};
use crate::e4m3::{self, E4M3};
use crate::exponent::{Element, ExponentRule};
use crate::ue8m0::Ue8m0;

/// A row-major `[rows, cols]` matrix as E4M3 codes with one exponent per 32x32 block, both sides
/// counted from the first row and column; blocks at the lower and right edge may be smaller.
///
/// The transposed matrix has the transposed codes and exponents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SquareBlocks {
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Codes, row-major `[rows, cols]`.
    pub codes: Vec<E4M3>,
    /// Exponents, row-major `[ceil(rows / 32), ceil(cols / 32)]`.
    pub exponents: Vec<Ue8m0>,
}

impl SquareBlocks {
    /// Quantises a whole matrix.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows of `cols` values.
    pub fn quantize(x: &[f32], cols: usize, rule: ExponentRule) -> Self {
        assert!(
            cols > 0 && x.len().is_multiple_of(cols),
            "{} values are no whole number of rows of {cols}",
            x.len()
        );
        let rows = x.len() / cols;
        let mut codes = vec![E4M3::ZERO; x.len()];
        let mut exponents = Vec::with_capacity(rows.div_ceil(BLOCK) * cols.div_ceil(BLOCK));
        let stripe = BLOCK.saturating_mul(cols);
        for (values, codes) in x.chunks(stripe).zip(codes.chunks_mut(stripe)) {
            for start in (0..cols).step_by(BLOCK) {
                let columns = start..cols.min(start + BLOCK);
                let amax = values
                    .chunks_exact(cols)
                    .map(|row| amax_bits(&row[columns.clone()]))
                    .fold(0, u32::max);
                let scale = BlockScale::new(amax, Element::E4M3, rule);
                for (row, codes) in values.chunks_exact(cols).zip(codes.chunks_exact_mut(cols)) {
                    scale.encode(&row[columns.clone()], &mut codes[columns.clone()]);
                }
                exponents.push(scale.exponent());
            }
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
        let blocks_per_row = self.cols.div_ceil(BLOCK);
        (0..self.rows)
            .flat_map(|row| (0..self.cols).map(move |col| (row, col)))
            .zip(&self.codes)
            .map(|((row, col), code)| {
                let exponent = self.exponents[row / BLOCK * blocks_per_row + col / BLOCK];
                code.to_f32() * exponent.to_f32()
            })
            .collect()
    }
}

/// Replaces one block, `rows` by `cols` values of a row-major matrix whose rows start `row_stride`
/// apart, by what its codes stand for, and returns its exponent. Values between the rows are left
/// alone. Gives the bits of the same block in [`SquareBlocks`].
///
/// # Panics
/// If a side is above 32, `row_stride` is below `cols`, or `tile` ends before the last row does.
#[inline(always)]
pub fn quantize_square_in_place(
    tile: &mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    rule: ExponentRule,
) -> Ue8m0 {
    assert!(
        rows <= BLOCK && cols <= BLOCK && cols <= row_stride,
        "a block of {rows} x {cols} with rows {row_stride} apart"
    );
    let amax = (0..rows)
        .map(|row| amax_bits(&tile[row * row_stride..][..cols]))
        .fold(0, u32::max);
    let scale = BlockScale::new(amax, Element::E4M3, rule);
    for row in 0..rows {
        scale.round(&mut tile[row * row_stride..][..cols], e4m3::round);
    }
    scale.exponent()
}
