//! The FP16 accumulator of dQ and the power of two that keeps its partial sums in range.

use flamia_format::pow2;
use flamia_sched::{Mask, visible_keys};

use crate::cpu::f16::round_f16;
use crate::cpu::operands::Prepared;
use crate::options::DqAccumulator;

/// The power of two on the partial sums of each row of dQ.
///
/// A partial sum of row i is bounded by Σ_j |dS_ij| |K_jc| with dS = P ∘ (dP - D): |dP| is at most
/// ‖dO_i‖ max‖V‖. Rounding to nearest at most doubles a magnitude: P inside O, so that
/// |D| <= 2 ‖dO_i‖ max‖V‖, and whatever of P and dS is rounded here, `roundings` times. The P of a row
/// sum to 1. That makes 3 · 2^roundings ‖dO_i‖ max‖V‖ max|K|; a factor of 4 instead of 3 leaves room
/// for the arithmetic's own rounding.
///
/// An O that is divided by the sum of the rounded P (`normalises_rounded`) is a mean of V's rows, but where
/// V's scales are folded into P: there it is a mean of codes times a mean of scales, and half their largest
/// product takes the place of max‖V‖ if it is more.
#[inline(always)]
pub(super) fn prescales(
    accumulator: DqAccumulator,
    roundings: i32,
    normalises_rounded: bool,
    d_o: &Prepared<f32>,
    v: &Prepared<f32>,
    k: &Prepared<f32>,
    mask: Mask,
) -> Vec<f32> {
    let (len, padded) = (d_o.dim.len, d_o.dim.padded_len());
    let mut prescales = vec![1.0; padded];
    if accumulator == DqAccumulator::Fp32 {
        return prescales;
    }
    let norms: Vec<f64> = (0..len).map(|row| largest(d_o, row)[0]).collect();
    // The largest ‖V‖ and |K| up to each key. What a NaN poisons is NaN anyway, and what it does not
    // must not notice: f64::max leaves it out.
    let mut running = [0.0f64; 4];
    let bounds: Vec<f64> = (0..len)
        .map(|key| {
            let [[norm, _], [_, magnitude]] = [largest(v, key), largest(k, key)];
            let [codes, scale] = if normalises_rounded {
                codes_and_scale(v, key)
            } else {
                [0.0; 2]
            };
            for (largest, x) in running.iter_mut().zip([norm, magnitude, codes, scale]) {
                *largest = largest.max(x);
            }
            let [norm, magnitude, codes, scale] = running;
            norm.max(codes * scale / 2.0) * magnitude
        })
        .collect();
    match accumulator {
        DqAccumulator::Fp32 => {}
        DqAccumulator::Fp16 => {
            let norm = norms.iter().copied().fold(0.0, f64::max);
            let bound = bounds.last().copied().unwrap_or(0.0);
            prescales.fill(power_of_two(norm * bound, roundings));
        }
        DqAccumulator::Fp16Causal => {
            for (row, prescale) in prescales[..len].iter_mut().enumerate() {
                let last = visible_keys(row, len, mask).end - 1;
                *prescale = power_of_two(norms[row] * bounds[last], roundings);
            }
        }
    }
    prescales
}

/// The largest norm and the largest magnitude in which a product reads row `row`.
#[inline(always)]
fn largest(operand: &Prepared<f32>, row: usize) -> [f64; 2] {
    operand
        .magnitudes(row)
        .fold([0.0, 0.0], |max, [norm, magnitude]| {
            [norm.max(max[0]), magnitude.max(max[1])]
        })
}

/// The norm of a row's codes in P·V, and the scale that is folded into P.
#[inline(always)]
fn codes_and_scale(v: &Prepared<f32>, row: usize) -> [f64; 2] {
    let (codes, fold) = v.over_tokens(false);
    let squares = codes.row(row).iter().map(|x| f64::from(*x).powi(2));
    let scale = fold.map_or(1.0, |fold| fold.factors[row].into());
    [squares.sum::<f64>().sqrt(), scale]
}

/// The largest power of two that brings 4 · 2^roundings · `bound` under 2^15; 1 without a bound.
#[inline(always)]
fn power_of_two(bound: f64, roundings: i32) -> f32 {
    if bound > 0.0 && bound.is_finite() {
        // Clamped so that the factor and its inverse are normal numbers.
        pow2((13 - roundings - bound.log2().ceil() as i32).clamp(-126, 126))
    } else {
        1.0
    }
}

/// Adds a partial sum to a row of dQ.
#[inline(always)]
pub(super) fn add(accumulator: DqAccumulator, dq: &mut [f32], partial: &[f32], prescale: f32) {
    if accumulator == DqAccumulator::Fp32 {
        for (dq, partial) in dq.iter_mut().zip(partial) {
            *dq += *partial;
        }
    } else {
        for (dq, partial) in dq.iter_mut().zip(partial) {
            *dq = round_f16(*dq + round_f16(partial * prescale));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::operands::{Contracted, Fold, Rows};

    /// Token 0 has codes in all features and a small scale, token 1 one code and a large scale: their
    /// codes' mean times their scales' mean can be longer than either.
    #[test]
    fn a_mean_of_codes_times_a_mean_of_scales_is_bounded() {
        const DIM: usize = 64;
        let rows = |values: [[f32; DIM]; 2]| {
            let mut rows = Rows::zeros(2, DIM);
            rows.unpadded_mut().copy_from_slice(values.as_flattened());
            rows
        };
        let ones = Prepared::uniform(rows([[1.0; DIM]; 2]));
        let mut single = [0.0; DIM];
        single[0] = 256.0;
        let factors = [0.25, 1.0];
        let v = Prepared {
            over_tokens: Some(Contracted {
                rows: rows([[256.0; DIM], single]),
                fold: Some(Fold {
                    factors: factors.to_vec(),
                    exponents: factors.map(f32::log2).to_vec(),
                }),
            }),
            ..Prepared::uniform(rows([[64.0; DIM], single]))
        };
        let of = |normalises_rounded, row: usize| {
            let causal = DqAccumulator::Fp16Causal;
            prescales(
                causal,
                1,
                normalises_rounded,
                &ones,
                &v,
                &ones,
                Mask::Causal,
            )[row]
        };
        // ‖V‖ is 512 and 256, ‖dO‖ 8, |K| 1: 8 · 8 · 512 is 2^15 already. Codes reach 2048, and half of
        // that times a scale of 1 is 1024.
        assert_eq!([of(false, 0), of(false, 1)], [1.0, 1.0]);
        assert_eq!([of(true, 0), of(true, 1)], [1.0, 0.5]);
    }
}
