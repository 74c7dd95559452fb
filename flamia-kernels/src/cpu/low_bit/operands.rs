//! How Q, K, V and dO are rounded for the products that read them.

use flamia_format::exponent::pow2;
use flamia_format::ue8m0::Ue8m0;
use flamia_format::{Element, e4m3, nvfp4_round_in_place, round_columns, round_group};

use super::{LowBit, quantize_tokens};
use crate::cpu::gemm::PAD;
use crate::cpu::operands::{Contracted, Fold, PerKey, Prepared, Role, Rows};
use crate::options::{Ablation, OperandScales, Path, ValueScales};

impl LowBit {
    #[inline(always)]
    pub(super) fn prepare(&self, role: Role, rows: Rows<f32>) -> Prepared<f32> {
        let unrounded = (self.ablate == Some(Ablation::UnquantisedD)
            && role == Role::OutputGradient)
            .then(|| rows.duplicate());
        let scored = matches!(role, Role::Query | Role::Key);
        let prepared = match self.path {
            Path::Fp4 => self.four_bit(role, rows),
            Path::Nvfp4 if scored => {
                let dim = self.nvfp4(role, rows.duplicate());
                let Prepared {
                    dim: eight_bit,
                    over_tokens,
                    ..
                } = self.eight_bit(role, rows);
                let over_tokens = over_tokens.unwrap_or(unfolded(eight_bit));
                Prepared {
                    over_tokens: Some(over_tokens),
                    ..Prepared::uniform(dim)
                }
            }
            _ => self.eight_bit(role, rows),
        };
        Prepared {
            unrounded,
            ..prepared
        }
    }

    /// E4M3 for all products.
    #[inline(always)]
    fn eight_bit(&self, role: Role, mut rows: Rows<f32>) -> Prepared<f32> {
        if let Some(amax) = self.tensor_amax(role) {
            round_to_tensor_scale(&mut rows, amax);
            return Prepared::uniform(rows);
        }
        match self.operand_scales {
            OperandScales::Block => {
                quantize_tokens(&mut rows, self.rule);
                Prepared::uniform(rows)
            }
            OperandScales::Token => {
                let (dim, folded) = self.per_token(rows, Element::E4M3);
                Prepared {
                    over_tokens: Some(folded),
                    ..Prepared::uniform(dim)
                }
            }
        }
    }

    /// NVFP4 for scores and dP's neighbours, MXFP4 over tokens, V with per-key scales besides.
    #[inline(always)]
    fn four_bit(&self, role: Role, rows: Rows<f32>) -> Prepared<f32> {
        let by_token = match role {
            Role::Key => self.k_fold || self.operand_scales == OperandScales::Token,
            Role::Value => {
                self.value_scales == ValueScales::Everywhere
                    || self.operand_scales == OperandScales::Token
            }
            Role::Query | Role::OutputGradient => self.operand_scales == OperandScales::Token,
        };
        let dim = match role {
            Role::Query | Role::Key => self.nvfp4(role, rows.duplicate()),
            Role::Value | Role::OutputGradient => self.along_rows(rows.duplicate()),
        };
        if by_token {
            let (values, folded) = self.per_token(rows, Element::E2M1);
            let dim = if role == Role::Value && self.v_fold {
                values
            } else {
                dim
            };
            return Prepared {
                over_tokens: Some(folded),
                ..Prepared::uniform(dim)
            };
        }
        let per_key = (role == Role::Value).then(|| {
            let (values, over_tokens) = self.per_token(rows.duplicate(), Element::E2M1);
            PerKey {
                dim: self.v_fold.then_some(values),
                over_tokens,
            }
        });
        Prepared {
            over_tokens: Some(unfolded(self.along_columns(rows))),
            per_key,
            ..Prepared::uniform(dim)
        }
    }

    /// NVFP4, one scale per 16 features of a token.
    #[inline(always)]
    fn nvfp4(&self, role: Role, mut rows: Rows<f32>) -> Rows<f32> {
        let dim = rows.dim;
        match self.tensor_amax(role) {
            // The format's usual second scale: the largest group scale becomes E4M3's largest.
            Some(amax) => {
                let scale = amax / (6.0 * 448.0);
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                rows.unpadded_mut().iter_mut().for_each(|x| *x *= inverse);
                nvfp4_round_in_place(rows.unpadded_mut(), dim);
                rows.unpadded_mut().iter_mut().for_each(|x| *x *= scale);
            }
            None => nvfp4_round_in_place(rows.unpadded_mut(), dim),
        }
        rows
    }

    /// MXFP4 along the features of a token.
    #[inline(always)]
    fn along_rows(&self, mut rows: Rows<f32>) -> Rows<f32> {
        for group in rows.unpadded_mut().chunks_exact_mut(PAD) {
            round_group(group, Element::E2M1, self.rule);
        }
        rows
    }

    /// MXFP4 along the tokens of a feature.
    #[inline(always)]
    fn along_columns(&self, mut rows: Rows<f32>) -> Rows<f32> {
        let dim = rows.dim;
        let mut exponents = vec![Ue8m0::ZERO_BLOCK; dim];
        for tile in rows.unpadded_mut().chunks_mut(PAD * dim) {
            let tokens = tile.len() / dim;
            round_columns(
                tile,
                tokens,
                dim,
                dim,
                Element::E2M1,
                self.rule,
                &mut exponents,
            );
        }
        rows
    }

    /// One exponent per token: the values, and the values of the codes with their scales apart.
    #[inline(always)]
    fn per_token(&self, mut rows: Rows<f32>, element: Element) -> (Rows<f32>, Contracted<f32>) {
        let (len, dim) = (rows.len, rows.dim);
        let mut codes = Rows::zeros(len, dim);
        let mut fold = Fold {
            factors: vec![0.0; rows.padded_len()],
            exponents: vec![f32::NEG_INFINITY; rows.padded_len()],
        };
        let pairs = rows
            .data
            .chunks_exact_mut(dim)
            .zip(codes.data.chunks_exact_mut(dim));
        for (token, (values, codes)) in pairs.take(len).enumerate() {
            let scale = round_group(values, element, self.rule);
            if scale == Ue8m0::ZERO_BLOCK {
                continue;
            }
            let Some(exponent) = scale.exponent() else {
                fold.factors[token] = f32::NAN;
                fold.exponents[token] = f32::NAN;
                continue;
            };
            fold.factors[token] = pow2(exponent);
            fold.exponents[token] = exponent as f32;
            let down = pow2(-exponent);
            for (code, value) in codes.iter_mut().zip(values) {
                *code = *value * down;
            }
        }
        let folded = Contracted {
            rows: codes,
            fold: Some(fold),
        };
        (rows, folded)
    }

    #[inline(always)]
    fn tensor_amax(&self, role: Role) -> Option<f32> {
        self.maxima.map(|maxima| match role {
            Role::Query => maxima.q,
            Role::Key => maxima.k,
            Role::Value => maxima.v,
            Role::OutputGradient => maxima.d_o,
        })
    }
}

#[inline(always)]
fn unfolded(rows: Rows<f32>) -> Contracted<f32> {
    Contracted { rows, fold: None }
}

/// E4M3 with one FP32 scale for the whole tensor.
#[inline(always)]
fn round_to_tensor_scale(rows: &mut Rows<f32>, amax: f32) {
    let scale = amax / 448.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    for x in rows.unpadded_mut() {
        *x = e4m3::round(*x * inverse) * scale;
    }
}
