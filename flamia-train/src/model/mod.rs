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

use flamia_sched::Documents;
use tch::{Reduction, TchError, Tensor};

use crate::attention::{Attend, AttentionFailure};

pub use params::{Init, ParamSpec, Params};
pub use rope::Rope;
pub use shape::{ModelShape, ShapeError};

/// The label of a token whose successor is not to be predicted.
pub const IGNORED_LABEL: i64 = -100;

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
}

/// The model: its shape and its parameters.
#[derive(Debug)]
pub struct Model {
    /// What it is built like.
    pub shape: ModelShape,
    /// Its weights, by Hugging Face's names.
    pub params: Params,
}

impl Model {
    /// Logits `[T, V]` for `tokens` `[T]` at `positions` `[T]` (both int64) of `documents`.
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
        let rope = Rope::new(positions, self.shape.head_dim, self.shape.rope_theta)?;
        let embedding = self.params.get("model.embed_tokens.weight");
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
        let h_td = self.norm(&x_td, "model.norm")?;
        let head = if self.shape.tied {
            embedding
        } else {
            self.params.get("lm_head.weight")
        };
        Ok(linear(&h_td, head)?)
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
        let logits_tv = self.forward(tokens, positions, documents, attention)?;
        Ok(logits_tv.f_cross_entropy_loss(
            labels,
            None::<&Tensor>,
            Reduction::Sum,
            IGNORED_LABEL,
            0.0,
        )?)
    }

    fn attend(
        &self,
        layer: usize,
        h_td: &Tensor,
        rope: &Rope,
        documents: &Documents,
        attention: &dyn Attend,
    ) -> Result<Tensor, ModelError> {
        let project = |name: &str, heads: usize| -> Result<Tensor, TchError> {
            linear(h_td, self.layer_weight(layer, &format!("self_attn.{name}")))?.f_reshape([
                -1,
                heads as i64,
                self.shape.head_dim as i64,
            ])
        };
        let q_the = rope.rotate(&project("q_proj", self.shape.heads)?)?;
        let k_tke = rope.rotate(&project("k_proj", self.shape.kv_heads)?)?;
        let v_tke = project("v_proj", self.shape.kv_heads)?;
        let o_the = attention
            .attend(layer, &q_the, &k_tke, &v_tke, documents)
            .map_err(|source| ModelError::Attention {
                layer,
                source: source.into(),
            })?;
        let width = (self.shape.heads * self.shape.head_dim) as i64;
        let o_td = o_the.f_reshape([-1, width])?;
        Ok(linear(&o_td, self.layer_weight(layer, "self_attn.o_proj"))?)
    }

    fn feed_forward(&self, layer: usize, h_td: &Tensor) -> Result<Tensor, TchError> {
        let gate = linear(h_td, self.layer_weight(layer, "mlp.gate_proj"))?.f_silu()?;
        let up = linear(h_td, self.layer_weight(layer, "mlp.up_proj"))?;
        linear(&gate.f_mul(&up)?, self.layer_weight(layer, "mlp.down_proj"))
    }

    fn norm(&self, x_td: &Tensor, name: &str) -> Result<Tensor, TchError> {
        let gain = self.params.get(&format!("{name}.weight"));
        x_td.f_rms_norm(gain.size(), Some(gain), self.shape.norm_eps)
    }

    fn layer_weight(&self, layer: usize, name: &str) -> &Tensor {
        self.params
            .get(&format!("model.layers.{layer}.{name}.weight"))
    }
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor, TchError> {
    x.f_linear(weight, None::<&Tensor>)
}
