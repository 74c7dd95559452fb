//! Groups that run down the columns of a row-major tile: one exponent per column.
//!
//! The loops run along the rows all the same, many columns at a time, because that is how the
//! values lie in memory.

use super::BLOCK;
use crate::exponent::{Element, ExponentRule, block_exponent_of};
use crate::ue8m0::Ue8m0;
use crate::{e2m1, e4m3};

/// Columns treated together; their scales stay in the first-level cache.
const STRIP: usize = 64;

/// Replaces a tile, `rows` by `cols` values of a row-major matrix whose rows start `row_stride`
/// apart, by what its codes stand for, every column being one group, and stores the columns'
/// exponents. Values between the rows are left alone.
///
/// # Panics
/// If `rows` is above 32, `row_stride` is below `cols`, `tile` ends before the last row does, or
/// `exponents` does not hold `cols` entries.
#[inline(always)]
pub fn round_columns(
    tile: &mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    element: Element,
    rule: ExponentRule,
    exponents: &mut [Ue8m0],
) {
    let shape = Tile::new(rows, cols, row_stride);
    match element {
        Element::E4M3 => shape.round(tile, element, rule, exponents, |x, _, _| e4m3::round(x)),
        Element::E2M1 => shape.round(tile, element, rule, exponents, |x, _, _| e2m1::round(x)),
    }
}

/// [`round_columns`] of E2M1 elements with stochastic rounding: `random(row, col)` gives the 32
/// uniform bits for the element at that place of the tile. Derive them from the element's place in
/// the whole tensor ([`random::bits`](crate::random::bits)), and tiling or threads do not matter.
///
/// The mean of a value is the value itself only under [`ExponentRule::Up`], since the other rule
/// clamps.
///
/// # Panics
/// As [`round_columns`] does.
#[inline(always)]
pub fn round_columns_stochastic(
    tile: &mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    rule: ExponentRule,
    exponents: &mut [Ue8m0],
    random: impl Fn(usize, usize) -> u32,
) {
    let shape = Tile::new(rows, cols, row_stride);
    shape.round(tile, Element::E2M1, rule, exponents, |x, row, col| {
        e2m1::round_stochastic(x, random(row, col))
    });
}

struct Tile {
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl Tile {
    #[inline(always)]
    fn new(rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(
            rows <= BLOCK && cols <= row_stride,
            "groups of {rows} rows, {cols} columns with rows {row_stride} apart"
        );
        Self {
            rows,
            cols,
            row_stride,
        }
    }

    #[inline(always)]
    fn round(
        &self,
        tile: &mut [f32],
        element: Element,
        rule: ExponentRule,
        exponents: &mut [Ue8m0],
        round: impl Fn(f32, usize, usize) -> f32,
    ) {
        assert_eq!(exponents.len(), self.cols, "one exponent per column");
        for (index, exponents) in exponents.chunks_mut(STRIP).enumerate() {
            let first = index * STRIP;
            let width = exponents.len();
            let mut amax = [0; STRIP];
            for row in 0..self.rows {
                let values = &tile[row * self.row_stride + first..][..width];
                for (amax, value) in amax.iter_mut().zip(values) {
                    *amax = (value.to_bits() & 0x7FFF_FFFF).max(*amax);
                }
            }
            let scales = Scales::new(&amax, element, rule, exponents);
            for row in 0..self.rows {
                let values = &mut tile[row * self.row_stride + first..][..width];
                for (col, value) in values.iter_mut().enumerate() {
                    let scaled = *value * scales.down[col];
                    let rounded = round(scaled, row, first + col) * scales.up[col];
                    *value = f32::from_bits(rounded.to_bits() & scales.keep[col]);
                }
            }
        }
    }
}

/// What the values of a strip's columns are multiplied by before and after rounding. A poisoned
/// column has NaN for both, which makes all of it NaN.
struct Scales {
    down: [f32; STRIP],
    up: [f32; STRIP],
    /// A column of zeros keeps no bit, so that its negative zeros become positive ones.
    keep: [u32; STRIP],
}

impl Scales {
    #[inline(always)]
    fn new(
        amax: &[u32; STRIP],
        element: Element,
        rule: ExponentRule,
        exponents: &mut [Ue8m0],
    ) -> Self {
        let mut scales = Self {
            down: [0.0; STRIP],
            up: [0.0; STRIP],
            keep: [0; STRIP],
        };
        for (col, exponent) in exponents.iter_mut().enumerate() {
            *exponent = block_exponent_of(f32::from_bits(amax[col]), element, rule);
            scales.down[col] = exponent.recip_f32();
            scales.up[col] = exponent.to_f32();
            scales.keep[col] = if amax[col] == 0 { 0 } else { u32::MAX };
        }
        scales
    }
}
