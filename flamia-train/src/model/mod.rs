//! A Llama-3-style decoder on packed documents.
//!
//! Pre-norm blocks of grouped-query attention and a SwiGLU feed-forward, no biases. All rows of a
//! micro-batch lie one after another in one packed row of `T` tokens; what keeps documents apart is
//! the [`Documents`] that attention gets and position ids that restart at 0 in each of them.
//!
//! Shape suffixes: `T` tokens, `D` hidden width, `H` query heads, `K` key/value heads, `E` head
//! dimension, `V` vocabulary.

mod params;
mod rope;
mod shape;
mod weights;

use flamia_autograd::FunctionError;
use flamia_sched::Documents;
use tch::{Kind, Reduction, TchError, Tensor};

use crate::attention::{Attend, AttentionFailure};
use crate::cross_entropy::chunked_cross_entropy;

pub use params::{Init, ParamSpec, Params};
pub use rope::Rope;
pub use shape::{ModelShape, ShapeError};
use weights::Copies;
pub use weights::Precision;

/// The label of a token whose successor is not to be predicted.
pub const IGNORED_LABEL: i64 = -100;

/// The embedding's name, and the output head's where they are one.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Logits that are held at once where nobody says how many: 256 MB in FP32.
const MOST_LOGITS: i64 = 1 << 26;

/// Why a forward pass failed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// An operation of torch's.
    #[error("torch refused an operation of the model")]
    Torch(#[from] TchError),
    /// The attention of one layer.
    #[error("attention of layer {layer} failed")]
    Attention {
        /// The layer, from 0.
        layer: usize,
        /// What it said.
        source: Box<AttentionFailure>,
    },
    /// A function of this project's in torch's graph.
    #[error(transparent)]
    Function(#[from] FunctionError),
}

/// The model: its shape, its parameters, and how it computes with them.
#[derive(Debug)]
pub struct Model {
    /// What it is built like.
    pub shape: ModelShape,
    /// Its weights, by Hugging Face's names.
    pub params: Params,
    /// What matrix products are computed in.
    pub precision: Precision,
    /// Tokens whose logits the loss holds at once; 0 for as many as have 2^26 logits.
    pub loss_chunk: usize,
    copies: Copies,
}

impl Model {
    /// A model that computes in FP32.
    pub fn new(shape: ModelShape, params: Params) -> Self {
        Self {
            shape,
            params,
            precision: Precision::Fp32,
            loss_chunk: 0,
            copies: Copies::default(),
        }
    }

    /// Logits `[T, V]` for `tokens` `[T]` at `positions` `[T]` (both int64) of `documents`, in FP32.
    ///
    /// # Errors
    /// [`ModelError`] when torch or attention refuses, as for a token id outside the vocabulary.
    pub fn forward(
        &self,
        tokens: &Tensor,
        positions: &Tensor,
        documents: &Documents,
        attention: &dyn Attend,
    ) -> Result<Tensor, ModelError> {
        let h_td = self.hidden(tokens, positions, documents, attention)?;
        Ok(linear(&h_td, &self.head()?)?.f_to_kind(Kind::Float)?)
    }

    /// The last token's row of [`Model::forward`], `[V]`: what follows all of `tokens`.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn last_logits(
        &self,
        tokens: &Tensor,
        positions: &Tensor,
        documents: &Documents,
        attention: &dyn Attend,
    ) -> Result<Tensor, ModelError> {
        let h_td = self.hidden(tokens, positions, documents, attention)?;
        let last_d = h_td.f_select(0, -1)?;
        Ok(linear(&last_d, &self.head()?)?.f_to_kind(Kind::Float)?)
    }

    /// The cross-entropy in nats, summed over the tokens whose label is not [`IGNORED_LABEL`].
    ///
    /// A sum, not a mean: only the caller knows how many labels the whole step has.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn summed_loss(
        &self,
        tokens: &Tensor,
        positions: &Tensor,
        labels: &Tensor,
        documents: &Documents,
        attention: &dyn Attend,
    ) -> Result<Tensor, ModelError> {
        let h_td = self.hidden(tokens, positions, documents, attention)?;
        let (head, rows) = (self.head()?, h_td.size()[0]);
        let chunk = match self.loss_chunk {
            0 => MOST_LOGITS / self.shape.vocab as i64,
            tokens => tokens as i64,
        };
        if chunk < rows {
            return Ok(chunked_cross_entropy(&h_td, &head, labels, chunk)?);
        }
        let logits_tv = linear(&h_td, &head)?.f_to_kind(Kind::Float)?;
        Ok(logits_tv.f_cross_entropy_loss(
            labels,
            None::<&Tensor>,
            Reduction::Sum,
            IGNORED_LABEL,
            0.0,
        )?)
    }

    /// What the output head reads, `[T, D]`.
    fn hidden(
        &self,
        tokens: &Tensor,
        positions: &Tensor,
        documents: &Documents,
        attention: &dyn Attend,
    ) -> Result<Tensor, ModelError> {
        let rope = Rope::new(positions, self.shape.head_dim, self.shape.rope_theta)?;
        let embedding = self.params.get(EMBEDDING);
        let mut x_td = Tensor::f_embedding(embedding, tokens, -1, false, false)?;
        for layer in 0..self.shape.layers {
            let h_td = self.norm(&x_td, &format!("model.layers.{layer}.input_layernorm"))?;
            x_td = x_td.f_add(&self.attend(layer, &h_td, &rope, documents, attention)?)?;
            let h_td = self.norm(
                &x_td,
                &format!("model.layers.{layer}.post_attention_layernorm"),
            )?;
            x_td = x_td.f_add(&self.feed_forward(layer, &h_td)?)?;
        }
        Ok(self.norm(&x_td, "model.norm")?)
    }

    /// The output head `[V, D]`, in the kind of products.
    fn head(&self) -> Result<Tensor, ModelError> {
        let name = match self.shape.tied {
            true => EMBEDDING,
            false => "lm_head.weight",
        };
        match self.precision {
            Precision::Fp32 => Ok(self.params.get(name).shallow_clone()),
            Precision::Bf16 => self.copies.stacked(&self.params, &[name.into()]),
        }
    }

    fn attend(
        &self,
        layer: usize,
        h_td: &Tensor,
        rope: &Rope,
        documents: &Documents,
        attention: &dyn Attend,
    ) -> Result<Tensor, ModelError> {
        let of = |name: &str| format!("model.layers.{layer}.self_attn.{name}.weight");
        let qkv = self.multiply(h_td, &[of("q_proj"), of("k_proj"), of("v_proj")])?;
        let heads =
            |x: &Tensor, heads: usize| x.f_reshape([-1, heads as i64, self.shape.head_dim as i64]);
        let q_the = rope.rotate(&heads(&qkv[0], self.shape.heads)?)?;
        let k_tke = rope.rotate(&heads(&qkv[1], self.shape.kv_heads)?)?;
        let v_tke = heads(&qkv[2], self.shape.kv_heads)?;
        let o_the = attention
            .attend(layer, &q_the, &k_tke, &v_tke, documents)
            .map_err(|source| ModelError::Attention {
                layer,
                source: source.into(),
            })?;
        let width = (self.shape.heads * self.shape.head_dim) as i64;
        let o_td = o_the.f_reshape([-1, width])?;
        Ok(self.multiply(&o_td, &[of("o_proj")])?.swap_remove(0))
    }

    fn feed_forward(&self, layer: usize, h_td: &Tensor) -> Result<Tensor, ModelError> {
        let of = |name: &str| format!("model.layers.{layer}.mlp.{name}.weight");
        let gate_up = self.multiply(h_td, &[of("gate_proj"), of("up_proj")])?;
        let hidden = gate_up[0].f_silu()?.f_mul(&gate_up[1])?;
        Ok(self.multiply(&hidden, &[of("down_proj")])?.swap_remove(0))
    }

    /// `x` times each of the weights `names`.
    fn multiply(&self, x: &Tensor, names: &[String]) -> Result<Vec<Tensor>, ModelError> {
        match self.precision {
            Precision::Fp32 => Ok(names
                .iter()
                .map(|name| linear(x, self.params.get(name)))
                .collect::<Result<_, TchError>>()?),
            Precision::Bf16 => self.copies.multiply(&self.params, x, names),
        }
    }

    /// RMSNorm in FP32, in the kind of products.
    fn norm(&self, x_td: &Tensor, name: &str) -> Result<Tensor, TchError> {
        let gain = self.params.get(&format!("{name}.weight"));
        let normed = x_td.f_rms_norm(gain.size(), Some(gain), self.shape.norm_eps)?;
        match self.precision {
            Precision::Fp32 => Ok(normed),
            Precision::Bf16 => normed.f_to_kind(Kind::BFloat16),
        }
    }
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor, TchError> {
    x.f_linear(weight, None::<&Tensor>)
}
