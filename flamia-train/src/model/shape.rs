//! What a model is built like, and the list of parameters that follows from it.

use super::params::{Init, ParamSpec};

/// The sizes of a Llama-3-style model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    /// Token ids.
    pub vocab: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, each shared by `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Dimension of one head, even.
    pub head_dim: usize,
    /// Width of the feed-forward.
    pub ffn_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f64,
    /// Whether the output head is the embedding.
    pub tied: bool,
}

/// A model that cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A size is zero.
    #[error("the model's {name} is 0; it must be at least 1")]
    Zero {
        /// Which one.
        name: &'static str,
    },
    /// Query heads cannot be shared out evenly.
    #[error(
        "{heads} query heads cannot share {kv_heads} key/value heads evenly; take a divisor of {heads}"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// RoPE rotates pairs.
    #[error("the head dimension is {head_dim}, but rotary embeddings need an even one")]
    OddHeadDim {
        /// The head dimension.
        head_dim: usize,
    },
}

impl ModelShape {
    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ShapeError`], naming the size.
    pub fn check(&self) -> Result<(), ShapeError> {
        let sizes = [
            ("vocabulary", self.vocab),
            ("width", self.dim),
            ("number of layers", self.layers),
            ("number of query heads", self.heads),
            ("number of key/value heads", self.kv_heads),
            ("head dimension", self.head_dim),
            ("feed-forward width", self.ffn_dim),
        ];
        if let Some(&(name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ShapeError::Zero { name });
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ShapeError::Heads {
                heads: self.heads,
                kv_heads: self.kv_heads,
            });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ShapeError::OddHeadDim {
                head_dim: self.head_dim,
            });
        }
        Ok(())
    }

    /// Floating-point operations of a training step on `tokens` tokens whose queries see `pairs` keys
    /// in all: a multiplication and an addition for each weight of a matrix product and for each
    /// entry of the two products of attention, forward once and backward twice. What is computed
    /// again, and the embedding's look-up, is not counted.
    pub fn training_flops(&self, tokens: u64, pairs: u64) -> f64 {
        let (q_width, kv_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let layer = self.dim * (2 * q_width + 2 * kv_width + 3 * self.ffn_dim);
        let weights = self.layers * layer + self.vocab * self.dim;
        let attention = 2 * self.layers * q_width;
        6.0 * (weights as f64 * tokens as f64 + attention as f64 * pairs as f64)
    }

    /// Every parameter with its shape and its initial distribution, in the order in which the
    /// random numbers are drawn. Matrices are `[out, in]`, as Hugging Face stores them.
    ///
    /// `init_std` is the standard deviation of the matrices; the two that write into the residual
    /// stream get `init_std / sqrt(2 * layers)`, so that the stream's variance does not grow with
    /// depth.
    pub fn parameters(&self, init_std: f64) -> Vec<ParamSpec> {
        let matrix = |name: String, out: usize, input: usize| ParamSpec {
            name,
            shape: vec![out as i64, input as i64],
            init: Init::Normal { std: init_std },
        };
        let residual = |name, out, input| ParamSpec {
            init: Init::Normal {
                std: init_std / (2.0 * self.layers as f64).sqrt(),
            },
            ..matrix(name, out, input)
        };
        let gain = |name| ParamSpec {
            name,
            shape: vec![self.dim as i64],
            init: Init::Ones,
        };

        let (q_width, kv_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut specs = vec![matrix(
            "model.embed_tokens.weight".into(),
            self.vocab,
            self.dim,
        )];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            specs.extend([
                gain(name("input_layernorm")),
                matrix(name("self_attn.q_proj"), q_width, self.dim),
                matrix(name("self_attn.k_proj"), kv_width, self.dim),
                matrix(name("self_attn.v_proj"), kv_width, self.dim),
                residual(name("self_attn.o_proj"), self.dim, q_width),
                gain(name("post_attention_layernorm")),
                matrix(name("mlp.gate_proj"), self.ffn_dim, self.dim),
                matrix(name("mlp.up_proj"), self.ffn_dim, self.dim),
                residual(name("mlp.down_proj"), self.dim, self.ffn_dim),
            ]);
        }
        specs.push(gain("model.norm.weight".into()));
        if !self.tied {
            specs.push(matrix("lm_head.weight".into(), self.vocab, self.dim));
        }
        specs
    }
}
