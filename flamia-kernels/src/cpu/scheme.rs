//! What rounding a path does where: the one place in which `reference` and the block-scaled
//! `mxfp8` differ.

use std::marker::PhantomData;

use flamia_format::e4m3::{self, E4M3};
use flamia_format::exponent::ExponentRule;
use flamia_format::ue8m0::Ue8m0;
use flamia_format::{quantize_square_in_place, quantize_token_blocks_in_place};
use flamia_sched::TILE;
use half::bf16;

use super::f16::round_f16;
use super::gemm::PAD;
use super::operands::{Rows, rotate};
use super::real::{Real, lane_sum};
use crate::options::{DqAccumulator, Options};
use crate::stats::StatsSnapshot;

/// The rounding of one path.
pub(crate) trait Scheme: Copy + Send + Sync {
    type Real: Real;
    /// An operand as the products read it.
    type Loaded: Send + Sync;

    /// Rotates rows by the Hadamard matrix.
    fn rotate(&self, rows: &mut Rows<Self::Real>);
    /// Rounds an operand.
    fn quantize(&self, rows: Rows<Self::Real>) -> Self::Loaded;
    /// Rounds a result for the caller.
    fn round_output(&self, rows: &mut [Self::Real]);
}

/// The rounding inside the tile loops that `reference` and the block-scaled `mxfp8` share.
pub(crate) trait BlockScheme: Scheme<Loaded = Rows<<Self as Scheme>::Real>> {
    /// The factor on P that dV is computed with.
    const DV_P_SCALE: f64;

    /// The power of two on P in the forward pass.
    fn c(&self) -> Self::Real;
    /// Slack of the running maximum.
    fn tau(&self) -> Self::Real;
    /// Rounds probabilities; returns how many were clamped.
    fn round_p(&self, p: &mut [Self::Real]) -> u64;
    /// Rounds [`PAD`] rows of dS of `width` entries, at a stride of [`TILE`].
    fn round_ds(&self, ds: &mut [Self::Real], width: usize) -> StatsSnapshot;
    /// The power of two on the partial sums of dQ.
    fn dq_prescale(
        &self,
        d_o: &Rows<Self::Real>,
        v: &Rows<Self::Real>,
        k: &Rows<Self::Real>,
    ) -> f64;
    /// Adds a partial sum to dQ.
    fn add_dq(&self, dq: &mut [Self::Real], partial: &[Self::Real], prescale: Self::Real);
}

/// No rounding but the arithmetic's own.
#[derive(Clone, Copy)]
pub(crate) struct Exact<R>(PhantomData<R>);

impl<R> Exact<R> {
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<R: Real> Scheme for Exact<R> {
    type Real = R;
    type Loaded = Rows<R>;

    #[inline(always)]
    fn rotate(&self, _: &mut Rows<R>) {
        unreachable!("Options::rotates is false for the reference path");
    }
    #[inline(always)]
    fn quantize(&self, rows: Rows<R>) -> Rows<R> {
        rows
    }
    #[inline(always)]
    fn round_output(&self, _: &mut [R]) {}
}

impl<R: Real> BlockScheme for Exact<R> {
    const DV_P_SCALE: f64 = 1.0;

    #[inline(always)]
    fn c(&self) -> R {
        R::ZERO
    }
    #[inline(always)]
    fn tau(&self) -> R {
        R::ZERO
    }
    #[inline(always)]
    fn round_p(&self, _: &mut [R]) -> u64 {
        0
    }
    #[inline(always)]
    fn round_ds(&self, _: &mut [R], _: usize) -> StatsSnapshot {
        StatsSnapshot::default()
    }
    #[inline(always)]
    fn dq_prescale(&self, _: &Rows<R>, _: &Rows<R>, _: &Rows<R>) -> f64 {
        1.0
    }
    #[inline(always)]
    fn add_dq(&self, dq: &mut [R], partial: &[R], _: R) {
        for (dq, partial) in dq.iter_mut().zip(partial) {
            *dq += *partial;
        }
    }
}

/// The `mxfp8` path where products apply block scales exactly: operands are held as the values
/// that their codes and exponents stand for.
#[derive(Clone, Copy)]
pub(crate) struct BlockScaled {
    c: f32,
    tau: f32,
    dq: DqAccumulator,
}

impl BlockScaled {
    pub fn new(options: &Options) -> Self {
        Self {
            c: options.c as f32,
            tau: options.tau,
            dq: options.dq,
        }
    }
}

/// Rounds an operand to token blocks in place and returns their exponents.
#[inline(always)]
pub(crate) fn quantize_tokens(rows: &mut Rows<f32>) -> Vec<Ue8m0> {
    let mut exponents = vec![Ue8m0::ZERO_BLOCK; rows.len.div_ceil(PAD)];
    let dim = rows.dim;
    quantize_token_blocks_in_place(rows.unpadded_mut(), dim, ExponentRule::Up, &mut exponents);
    exponents
}

/// Rounds to E4M3 and counts what had to be clamped.
#[inline(always)]
pub(crate) fn round_codes(values: &mut [f32]) -> u64 {
    let mut clamped = 0u32;
    for value in values {
        clamped += u32::from(value.abs() > E4M3::MAX);
        *value = e4m3::round(*value);
    }
    clamped.into()
}

/// Entries that are not zero.
#[inline(always)]
pub(crate) fn count_nonzero(values: &[f32]) -> u64 {
    values
        .iter()
        .map(|value| u32::from(*value != 0.0))
        .sum::<u32>()
        .into()
}

/// Rounds to BF16, the type of every result of the low-bit paths.
#[inline(always)]
pub(crate) fn round_bf16(values: &mut [f32]) {
    for value in values {
        *value = bf16::from_f32(*value).to_f32();
    }
}

impl Scheme for BlockScaled {
    type Real = f32;
    type Loaded = Rows<f32>;

    #[inline(always)]
    fn rotate(&self, rows: &mut Rows<f32>) {
        let dim = rows.dim;
        rotate(rows.unpadded_mut(), dim);
    }
    #[inline(always)]
    fn quantize(&self, mut rows: Rows<f32>) -> Rows<f32> {
        quantize_tokens(&mut rows);
        rows
    }
    #[inline(always)]
    fn round_output(&self, rows: &mut [f32]) {
        round_bf16(rows);
    }
}

impl BlockScheme for BlockScaled {
    // Paper, appendix B.1.
    const DV_P_SCALE: f64 = 256.0;

    #[inline(always)]
    fn c(&self) -> f32 {
        self.c
    }
    #[inline(always)]
    fn tau(&self) -> f32 {
        self.tau
    }
    #[inline(always)]
    fn round_p(&self, p: &mut [f32]) -> u64 {
        round_codes(p)
    }

    #[inline(always)]
    fn round_ds(&self, ds: &mut [f32], width: usize) -> StatsSnapshot {
        let mut nonzero = 0;
        let mut kept = 0;
        for row in ds.chunks_exact(TILE) {
            nonzero += count_nonzero(&row[..width]);
        }
        for col in (0..width).step_by(PAD) {
            quantize_square_in_place(&mut ds[col..], PAD, PAD, TILE, ExponentRule::Up);
        }
        for row in ds.chunks_exact(TILE) {
            kept += count_nonzero(&row[..width]);
        }
        StatsSnapshot {
            ds_nonzero: nonzero,
            ds_flushed: nonzero - kept,
            saturated: 0,
        }
    }

    /// Every partial sum of row i is bounded by Σ_j |dS_ij| |K_jc| with dS = P ∘ (dP - D), hence by
    /// 2 · max‖dO‖ · max‖V‖ · max|K| in exact arithmetic. Rounding adds 2^-4 to each factor that is
    /// rounded (O inside D, dS), and up to 2^-18 of the block maximum for each key whose dS is
    /// under E4M3's normal range. A further factor of two is left for the roundings of the sum.
    #[inline(always)]
    fn dq_prescale(&self, d_o: &Rows<f32>, v: &Rows<f32>, k: &Rows<f32>) -> f64 {
        match self.dq {
            DqAccumulator::Fp32 => 1.0,
            DqAccumulator::Fp16 | DqAccumulator::Fp16Causal => {
                let slack = 2.25 * (1.0625 + k.len as f64 / f64::from(1 << 18));
                let bound = slack * largest_norm(d_o) * largest_norm(v) * largest(&k.data);
                if bound > 0.0 && bound.is_finite() {
                    // Bounded so that the factor and its inverse are normal f32 numbers.
                    2f64.powi((15 - bound.log2().ceil() as i32).clamp(-126, 126))
                } else {
                    1.0
                }
            }
        }
    }

    #[inline(always)]
    fn add_dq(&self, dq: &mut [f32], partial: &[f32], prescale: f32) {
        match self.dq {
            DqAccumulator::Fp32 => {
                for (dq, partial) in dq.iter_mut().zip(partial) {
                    *dq += *partial;
                }
            }
            DqAccumulator::Fp16 | DqAccumulator::Fp16Causal => {
                for (dq, partial) in dq.iter_mut().zip(partial) {
                    *dq = round_f16(*dq + round_f16(partial * prescale));
                }
            }
        }
    }
}

/// The largest 2-norm of a row. Rows with NaN are left out: what reads them is NaN anyway, and what
/// does not must not notice.
#[inline(always)]
fn largest_norm(rows: &Rows<f32>) -> f64 {
    rows.data
        .chunks_exact(rows.dim)
        .map(|row| lane_sum(row.iter().map(|x| f64::from(*x) * f64::from(*x))))
        .fold(0.0, |largest, norm| norm.max(largest))
        .sqrt()
}

/// The largest magnitude, NaN left out.
#[inline(always)]
fn largest(values: &[f32]) -> f64 {
    values
        .iter()
        .fold(0.0f32, |largest, value| Real::max(value.abs(), largest))
        .into()
}
