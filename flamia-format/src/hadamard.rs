//! The normalised Walsh–Hadamard rotation of the head dimension.
//!
//! It is orthonormal and symmetric, hence its own inverse up to rounding. Rotating Q and K alike
//! leaves every score unchanged and spreads an outlier channel over all of them before quantising.

/// Why a buffer cannot be rotated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HadamardError {
    /// The fast transform halves its length again and again.
    #[error(
        "the Hadamard rotation needs a row length that is a power of two, found {cols}: turn the \
         rotation off for this head dimension"
    )]
    NotPowerOfTwo {
        /// Row length given.
        cols: usize,
    },
    /// The buffer does not hold whole rows.
    #[error("{len} values are no whole number of rows of {cols}: check the buffer's shape")]
    PartialRow {
        /// Values in the buffer.
        len: usize,
        /// Row length given.
        cols: usize,
    },
}

/// Rotates one row in place: butterflies with strides 1, 2, 4, … in `f32`, then a multiplication by
/// 1/sqrt(n) rounded to `f32`. The order is part of the contract, so that every implementation gives
/// the same bits.
///
/// # Errors
/// When the length is not a power of two.
#[inline(always)]
pub fn hadamard(x: &mut [f32]) -> Result<(), HadamardError> {
    hadamard_rows(x, x.len())
}

/// Rotates every row of the row-major `[rows, cols]` matrix `x` in place.
///
/// # Errors
/// When `cols` is not a power of two or does not divide the length of `x`.
#[inline(always)]
pub fn hadamard_rows(x: &mut [f32], cols: usize) -> Result<(), HadamardError> {
    if !cols.is_power_of_two() {
        return Err(HadamardError::NotPowerOfTwo { cols });
    }
    if !x.len().is_multiple_of(cols) {
        return Err(HadamardError::PartialRow { len: x.len(), cols });
    }
    let norm = (1.0 / (cols as f64).sqrt()) as f32;
    for row in x.chunks_exact_mut(cols) {
        let mut stride = 1;
        while stride < cols {
            butterflies(row, stride);
            stride *= 2;
        }
        for value in row {
            *value *= norm;
        }
    }
    Ok(())
}

#[inline(always)]
fn butterflies(row: &mut [f32], stride: usize) {
    for pair in row.chunks_exact_mut(2 * stride) {
        let (low, high) = pair.split_at_mut(stride);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}
