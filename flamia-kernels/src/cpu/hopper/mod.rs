//! The `hopper` profile of `mxfp8`: what an unscaled FP8 MMA can do.
//!
//! Products multiply codes. A block scale that is constant along the contraction multiplies the
//! result; one that varies along it is folded, as a power of two, into the operand that the kernel
//! holds in FP32 (P or dS) before that is rounded, relative to a running reference of the
//! accumulator row. The backward pass is the two-kernel form, dK with dV, then dQ, unless the one-kernel form
//! is named, whose dV is the same.

mod accumulator;
mod forward;
mod fused;
mod keys;
mod queries;
mod recompute;
mod reference;

use std::ops::Range;

use flamia_format::e4m3;
use flamia_format::exponent::{ExponentRule, pow2};
use flamia_format::ue8m0::Ue8m0;
use flamia_sched::Mask;
use rayon::prelude::*;

use self::forward::QueryTile;
use self::keys::{KeyGradients, KeyHead};
use self::queries::{QueryGradients, QueryHead};
use super::backward::RowSums;
use super::forward::TileOutput;
use super::gemm::PAD;
use super::low_bit::{quantize_tokens, round_bf16};
use super::operands::{Panels, Role, Rows, rotate};
use super::scheme::Scheme;
use super::simd::dispatch;
use super::unit::{Backend, SavedHead, UnitGradients};
use crate::options::{BackwardForm, DqAccumulator, MmaAccumulator, Options};

/// The smallest exponent of an operand. Folding V's exponents into P takes them out of the row sum
/// again, as 2^-e; the floor keeps that sum finite. A block whose largest magnitude is under 2^-87
/// loses precision to it.
const MIN_EXPONENT: i32 = -96;

/// The rounding and accumulation of the profile.
#[derive(Clone, Copy)]
pub(crate) struct Hopper {
    pub c: f32,
    pub tau: f32,
    /// Whether O is divided by the sum of the rounded P.
    pub normalises_rounded: bool,
    pub hysteresis: i32,
    pub accumulator: MmaAccumulator,
    pub backward: BackwardForm,
    pub dq: DqAccumulator,
}

impl Hopper {
    pub fn new(options: &Options) -> Self {
        Self {
            c: options.c as f32,
            tau: options.tau,
            normalises_rounded: options.normalises_rounded(),
            hysteresis: options.hysteresis,
            accumulator: options.accumulator,
            backward: options.backward,
            dq: options.dq,
        }
    }
}

/// An operand as codes and exponents.
pub(crate) struct Codes {
    /// The values of the codes.
    pub rows: Rows<f32>,
    /// One per token block.
    exponents: Vec<Ue8m0>,
}

impl Codes {
    /// The exponent of a token block that is neither zero nor poisoned.
    #[inline(always)]
    pub fn exponent(&self, block: usize) -> Option<i32> {
        let exponent = self.exponents[block];
        if exponent == Ue8m0::ZERO_BLOCK {
            None
        } else {
            exponent.exponent()
        }
    }

    /// The exponent to fold. A zero block folds as the smallest one, so that it never sets a
    /// reference that a real block would lose bits to; a poisoned one poisons through its codes.
    #[inline(always)]
    pub fn fold(&self, block: usize) -> i32 {
        self.exponent(block).unwrap_or(MIN_EXPONENT)
    }

    /// The values that codes and scales stand for.
    fn dequantize(&self) -> Rows<f32> {
        let Rows { data, len, dim } = &self.rows;
        let mut rows = Rows {
            data: data.clone(),
            len: *len,
            dim: *dim,
        };
        for (i, block) in rows.data.chunks_exact_mut(PAD * dim).enumerate() {
            // The codes of a poisoned block are NaN, whatever they are multiplied with.
            let scale = self.scale(i);
            block.iter_mut().for_each(|x| *x *= scale);
        }
        rows
    }

    /// The scale of a token block; 0 for a zero block, whose codes are all 0.
    #[inline(always)]
    pub fn scale(&self, block: usize) -> f32 {
        self.exponent(block).map_or(0.0, pow2)
    }
}

impl Scheme for Hopper {
    type Real = f32;
    type Loaded = Codes;

    #[inline(always)]
    fn rotate(&self, rows: &mut Rows<f32>) {
        let dim = rows.dim;
        rotate(rows.unpadded_mut(), dim);
    }

    #[inline(always)]
    fn quantize(&self, _: Role, mut rows: Rows<f32>) -> Codes {
        let mut exponents = quantize_tokens(&mut rows, ExponentRule::Up);
        for (exponent, block) in exponents
            .iter_mut()
            .zip(rows.data.chunks_exact_mut(PAD * rows.dim))
        {
            let Some(e) = exponent.exponent() else {
                continue;
            };
            if *exponent != Ue8m0::ZERO_BLOCK {
                *exponent = Ue8m0::from_exponent(e.max(MIN_EXPONENT));
            }
            let down = pow2(-e.max(MIN_EXPONENT));
            for value in block {
                *value = e4m3::round(*value * down);
            }
        }
        Codes { rows, exponents }
    }

    #[inline(always)]
    fn round_output(&self, rows: &mut [f32]) {
        round_bf16(rows);
    }
}

/// Keys and values of one head of one document: codes in both orientations.
pub(crate) struct KeysValues {
    k: Codes,
    v: Codes,
    k_panels: Panels<f32>,
    v_panels: Panels<f32>,
}

/// A query head of one document in the backward pass.
struct QueryOperands {
    q: Codes,
    d_o: Codes,
    sums: RowSums<f32>,
}

impl Backend for Hopper {
    type KeysValues = KeysValues;

    fn keys_values(&self, k: Codes, v: Codes) -> KeysValues {
        let (k_panels, v_panels) = (Panels::new(&k.rows), Panels::new(&v.rows));
        KeysValues {
            k,
            v,
            k_panels,
            v_panels,
        }
    }

    fn attend(
        &self,
        q: &Codes,
        kv: &KeysValues,
        queries: Range<usize>,
        mask: Mask,
        scale: f64,
    ) -> TileOutput<f32> {
        let scale = (scale * std::f64::consts::LOG2_E) as f32;
        dispatch(QueryTile {
            scheme: self,
            q,
            kv,
            queries,
            mask,
            scale,
        })
    }

    fn gradients(
        &self,
        kv: &KeysValues,
        heads: Vec<SavedHead<Self>>,
        mask: Mask,
        scale: f64,
    ) -> UnitGradients<f32> {
        let heads: Vec<QueryOperands> = heads
            .into_iter()
            .map(|SavedHead { q, d_o, o, lse, .. }| {
                let sums = RowSums::new(&d_o.dequantize(), &o, &lse);
                QueryOperands { q, d_o, sums }
            })
            .collect();
        let key_head = KeyHead {
            scheme: self,
            kv,
            heads: &heads,
            mask,
            scale,
        };
        if self.backward == BackwardForm::OneKernel {
            let KeyGradients { dk, dv, dq, counts } = dispatch(key_head);
            let dq = dq.expect("the one-kernel form gives dQ");
            return UnitGradients { dq, dk, dv, counts };
        }
        let (keys, queries) = rayon::join(
            || dispatch(key_head),
            || -> Vec<QueryGradients> {
                heads
                    .par_iter()
                    .map(|head| {
                        dispatch(QueryHead {
                            scheme: self,
                            kv,
                            head,
                            mask,
                            scale,
                        })
                    })
                    .collect()
            },
        );
        let mut counts = keys.counts;
        queries.iter().for_each(|head| counts += head.counts);
        let dq = queries.into_iter().map(|head| head.dq).collect();
        UnitGradients {
            dq,
            dk: keys.dk,
            dv: keys.dv,
            counts,
        }
    }
}
