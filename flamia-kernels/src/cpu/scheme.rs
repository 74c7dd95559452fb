//! What rounding a path does where: the one place in which `reference` and the block-scaled paths
//! differ.

use std::marker::PhantomData;
use std::ops::Range;

use flamia_sched::Mask;

use super::block::Block;
use super::operands::{Fold, Prepared, Role, Rows};
use super::real::Real;
use super::softmax::{Sums, lane_total, relative};
use crate::stats::StatsSnapshot;

/// The rounding of one path.
pub(crate) trait Scheme: Copy + Send + Sync {
    type Real: Real;
    /// An operand as the products read it.
    type Loaded: Send + Sync;

    /// Rotates rows by the Hadamard matrix.
    fn rotate(&self, rows: &mut Rows<Self::Real>);
    /// Rounds an operand.
    fn quantize(&self, role: Role, rows: Rows<Self::Real>) -> Self::Loaded;
    /// Rounds a result for the caller.
    fn round_output(&self, rows: &mut [Self::Real]);
}

/// Forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// dS as the two products that contract it read it, [`PAD`](super::gemm::PAD) rows at a stride of
/// [`TILE`](flamia_sched::TILE).
pub(crate) struct SoftmaxGradients<'a, R> {
    /// dS on entry; what dQ reads afterwards, and dK too unless told otherwise.
    pub ds: &'a mut [R],
    /// What dK reads if that is another rounding.
    pub for_dk: &'a mut [R],
}

/// What a product over tokens has taken out of its operands and into dS.
pub(crate) struct Folds<'a, R> {
    pub k: Option<&'a Fold<R>>,
    pub q: Option<&'a Fold<R>>,
}

/// The rounding inside the tile loops that `reference` and the block-scaled paths share.
pub(crate) trait BlockScheme: Scheme<Loaded = Prepared<<Self as Scheme>::Real>> {
    /// The power of two on P in the forward pass.
    fn c(&self) -> Self::Real;
    /// Slack of the running maximum.
    fn tau(&self) -> Self::Real;
    /// The factor on P that dV is computed with.
    fn dv_scale(&self) -> Self::Real;
    /// Whether queries of the token block at `row` read the keys at `key` with per-key scales.
    fn per_key(&self, pass: Pass, mask: Mask, row: usize, key: usize) -> bool;
    /// What exponentials become relative to when `max` is the largest score so far.
    fn reference(&self, max: Self::Real) -> Self::Real;
    /// Turns the base-2 scores of one row, -∞ where a key is not `visible`, into P relative to
    /// `max` as P·V reads it. `fold` is V's, for the same keys on. Returns the sums of P, and
    /// how many were clamped.
    fn probabilities(
        &self,
        scores: &mut [Self::Real],
        max: Self::Real,
        visible: &Range<usize>,
        fold: Option<(&Fold<Self::Real>, usize)>,
    ) -> (Sums<Self::Real>, u64);
    /// 2^x of the backward pass.
    fn exp2(&self, x: &mut [Self::Real]);
    /// Where dS is made of the forward pass's rounded P instead of the exact one: fills `p` with it
    /// from the base-2 scores of a row, and returns true.
    fn rebuild(
        &self,
        p: &mut [Self::Real],
        scores: &[Self::Real],
        lse2: Self::Real,
        visible: &Range<usize>,
        fold: Option<(&Fold<Self::Real>, usize)>,
    ) -> bool;
    /// Whether D is summed over the probabilities and dP that dS is made of, instead of coming from
    /// the output.
    fn sums_d(&self) -> bool;
    /// Rounds the P of `block` for dV, `fold` being dO's; returns how many were clamped.
    fn round_p(&self, p: &mut [Self::Real], block: &Block, fold: Option<&Fold<Self::Real>>) -> u64;
    /// Rounds the dS of `block` of query head `head`; returns whether dK reads the second buffer.
    fn round_ds(
        &self,
        gradients: SoftmaxGradients<Self::Real>,
        block: &Block,
        folds: Folds<Self::Real>,
        head: usize,
    ) -> (bool, StatsSnapshot);
    /// The power of two on the partial sums of each row of dQ.
    fn dq_prescales(
        &self,
        d_o: &Prepared<Self::Real>,
        v: &Prepared<Self::Real>,
        k: &Prepared<Self::Real>,
        mask: Mask,
    ) -> Vec<Self::Real>;
    /// Adds a partial sum to a row of dQ.
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
    type Loaded = Prepared<R>;

    #[inline(always)]
    fn rotate(&self, _: &mut Rows<R>) {
        unreachable!("Options::rotates is false for the reference path");
    }
    #[inline(always)]
    fn quantize(&self, _: Role, rows: Rows<R>) -> Prepared<R> {
        Prepared::uniform(rows)
    }
    #[inline(always)]
    fn round_output(&self, _: &mut [R]) {}
}

impl<R: Real> BlockScheme for Exact<R> {
    #[inline(always)]
    fn c(&self) -> R {
        R::ZERO
    }
    #[inline(always)]
    fn tau(&self) -> R {
        R::ZERO
    }
    #[inline(always)]
    fn dv_scale(&self) -> R {
        R::from_f64(1.0)
    }
    #[inline(always)]
    fn per_key(&self, _: Pass, _: Mask, _: usize, _: usize) -> bool {
        false
    }
    #[inline(always)]
    fn probabilities(
        &self,
        scores: &mut [R],
        max: R,
        _: &Range<usize>,
        _: Option<(&Fold<R>, usize)>,
    ) -> (Sums<R>, u64) {
        relative(scores, max, R::ZERO);
        self.exp2(scores);
        (Sums::unrounded(lane_total(scores)), 0)
    }
    #[inline(always)]
    fn reference(&self, max: R) -> R {
        max
    }
    #[inline(always)]
    fn exp2(&self, x: &mut [R]) {
        for x in x {
            *x = x.exp2();
        }
    }
    #[inline(always)]
    fn rebuild(
        &self,
        _: &mut [R],
        _: &[R],
        _: R,
        _: &Range<usize>,
        _: Option<(&Fold<R>, usize)>,
    ) -> bool {
        false
    }
    #[inline(always)]
    fn sums_d(&self) -> bool {
        false
    }
    #[inline(always)]
    fn round_p(&self, _: &mut [R], _: &Block, _: Option<&Fold<R>>) -> u64 {
        0
    }
    #[inline(always)]
    fn round_ds(
        &self,
        _: SoftmaxGradients<R>,
        _: &Block,
        _: Folds<R>,
        _: usize,
    ) -> (bool, StatsSnapshot) {
        (false, StatsSnapshot::default())
    }
    #[inline(always)]
    fn dq_prescales(&self, d_o: &Prepared<R>, _: &Prepared<R>, _: &Prepared<R>, _: Mask) -> Vec<R> {
        vec![R::from_f64(1.0); d_o.dim.padded_len()]
    }
    #[inline(always)]
    fn add_dq(&self, dq: &mut [R], partial: &[R], _: R) {
        for (dq, partial) in dq.iter_mut().zip(partial) {
            *dq += *partial;
        }
    }
}
