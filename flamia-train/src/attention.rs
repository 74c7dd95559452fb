//! Attention by name, in the one place where the model calls it.

use std::sync::Arc;

use flamia_autograd::AttentionError;
use flamia_kernels::{DqAccumulator, Hadamard, Mask, Options, Path, Profile, Stats};
use flamia_sched::Documents;
use tch::{TchError, Tensor};

use crate::settings::{self, Settings};

/// Why attention failed.
#[derive(Debug, thiserror::Error)]
pub enum AttentionFailure {
    /// torch's own attention, or an operation around it.
    #[error("torch refused")]
    Torch(#[from] TchError),
    /// This project's attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

/// How the model attends.
#[derive(Debug)]
pub enum Attention {
    /// torch's scaled_dot_product_attention, one document at a time: the baseline.
    Sdpa,
    /// This project's attention, exact or in low bits.
    Flamia {
        /// Path and numerics.
        options: Options,
        /// What quantisation did, layer by layer.
        layers: Vec<Arc<Stats>>,
    },
}

impl Attention {
    /// The attention that `settings` name.
    pub fn new(settings: &Settings) -> Self {
        let path = match settings.attention {
            settings::Attention::Sdpa => return Self::Sdpa,
            settings::Attention::Reference => Path::Reference,
            settings::Attention::Mxfp8 => Path::Mxfp8,
        };
        let kernel = &settings.kernel;
        let options = Options {
            profile: match kernel.profile {
                settings::Profile::BlockScaled => Profile::BlockScaled,
                settings::Profile::Hopper => Profile::Hopper,
            },
            hadamard: match kernel.hadamard {
                settings::Hadamard::Auto => Hadamard::Auto,
                settings::Hadamard::On => Hadamard::On,
                settings::Hadamard::Off => Hadamard::Off,
            },
            dq: match kernel.dq {
                settings::Dq::Fp16 => DqAccumulator::Fp16,
                settings::Dq::Fp32 => DqAccumulator::Fp32,
            },
            c: kernel.c as i32,
            tau: kernel.tau as f32,
            ..Options::new(path, Mask::Causal)
        };
        Self::Flamia {
            options,
            layers: (0..settings.model.layers).map(|_| Arc::default()).collect(),
        }
    }

    /// Causal attention of layer `layer` within each document: `q` `[T, H, E]`, `k` and `v`
    /// `[T, K, E]` give `[T, H, E]`; query head `h` reads key/value head `h / (H / K)`.
    ///
    /// # Errors
    /// [`AttentionFailure`] from the implementation chosen.
    pub fn apply(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
    ) -> Result<Tensor, AttentionFailure> {
        match self {
            Self::Sdpa => Ok(sdpa(q, k, v, documents)?),
            Self::Flamia { options, layers } => Ok(flamia_autograd::attention(
                q,
                k,
                v,
                documents,
                options,
                layers.get(layer),
            )?),
        }
    }

    /// What quantisation did since the last call, as curves; none for the exact paths.
    pub fn take_statistics(&self) -> Vec<(String, f64)> {
        match self {
            Self::Flamia { options, layers } if options.path == Path::Mxfp8 => layers
                .iter()
                .enumerate()
                .flat_map(|(layer, stats)| {
                    let counts = stats.take();
                    [
                        (
                            format!("attention/layer{layer}/ds_flush_fraction"),
                            counts.ds_flush_fraction(),
                        ),
                        (
                            format!("attention/layer{layer}/saturated"),
                            counts.saturated as f64,
                        ),
                    ]
                })
                .collect(),
            _ => Vec::new(),
        }
    }
}
fn sdpa(q: &Tensor, k: &Tensor, v: &Tensor, documents: &Documents) -> Result<Tensor, TchError> {
    let heads = q.size()[1];
    let outputs = documents
        .iter()
        .filter(|rows| !rows.is_empty())
        .map(|rows| {
            // [T, heads, E] to [1, heads, rows, E]. The key/value heads are repeated by hand: torch's
            // fast CPU kernel takes no grouped heads.
            let document = |x: &Tensor| {
                let x = x
                    .f_narrow(0, rows.start as i64, rows.len() as i64)?
                    .f_transpose(0, 1)?;
                let group = heads / x.size()[0];
                let x = if group == 1 {
                    x
                } else {
                    x.f_repeat_interleave_self_int(group, 0, None)?
                };
                x.f_unsqueeze(0)
            };
            Tensor::f_scaled_dot_product_attention(
                &document(q)?,
                &document(k)?,
                &document(v)?,
                None::<&Tensor>,
                0.0,
                true,
                None,
                false,
            )?
            .f_squeeze_dim(0)?
            .f_transpose(0, 1)
        })
        .collect::<Result<Vec<_>, TchError>>()?;
    match outputs.is_empty() {
        true => q.f_zeros_like(),
        false => Tensor::f_cat(&outputs, 0),
    }
}
