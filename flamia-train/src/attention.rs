//! Attention by name, in the one place where the model calls it.

use std::sync::Arc;

use flamia_autograd::AttentionError;
use flamia_kernels::{Mask, Options, Stats};
use flamia_sched::Documents;
use tch::{Device, Kind, TchError, Tensor};

use crate::rng::seed_of;
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

/// Attention as the model calls it.
pub trait Attend {
    /// Causal attention of layer `layer` within each document: `q` `[T, H, E]`, `k` and `v`
    /// `[T, K, E]` give `[T, H, E]`; query head `h` reads key/value head `h / (H / K)`.
    ///
    /// # Errors
    /// [`AttentionFailure`] from the implementation.
    fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
    ) -> Result<Tensor, AttentionFailure>;
}

/// The attentions that settings name.
#[derive(Debug, Clone)]
pub enum Attention {
    /// torch's scaled_dot_product_attention, one document at a time: the baseline.
    Sdpa {
        /// Which keys a query sees.
        mask: Mask,
    },
    /// This project's attention, exact or in low bits.
    Flamia {
        /// Path and numerics; their seed is the run's.
        options: Options,
        /// Which step and which of its micro-batches calls, from 0: calls draw apart.
        call: [u64; 2],
        /// What quantisation did, layer by layer.
        layers: Vec<Arc<Stats>>,
    },
}

impl Attention {
    /// The attention that `settings` name, in the first micro-batch of the first step.
    pub fn new(settings: &Settings) -> Self {
        let kernel = &settings.kernel;
        match settings.attention {
            settings::Attention::Sdpa => Self::Sdpa {
                mask: kernel.mask(),
            },
            settings::Attention::Path(path) => Self::Flamia {
                options: Options {
                    seed: settings.seed,
                    ..kernel.options(path)
                },
                call: [0, 0],
                layers: (0..settings.model.layers).map(|_| Arc::default()).collect(),
            },
        }
    }

    /// The same attention, as micro-batch `micro_batch` of step `step`, both from 0, calls it: with
    /// random bits of its own, and the same ones whenever that step is done again.
    #[must_use]
    pub fn at(&self, step: u64, micro_batch: u64) -> Self {
        let mut attention = self.clone();
        if let Self::Flamia { call, .. } = &mut attention {
            *call = [step, micro_batch];
        }
        attention
    }

    /// What quantisation did since the last call, as curves; none for the exact paths.
    pub fn take_statistics(&self) -> Vec<(String, f64)> {
        match self {
            Self::Flamia {
                options, layers, ..
            } if options.path.is_low_bit() => layers
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

impl Attend for Attention {
    fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
    ) -> Result<Tensor, AttentionFailure> {
        match self {
            Self::Sdpa { mask } => Ok(sdpa(q, k, v, documents, *mask)?),
            Self::Flamia {
                options,
                call,
                layers,
            } => Ok(flamia_autograd::attention(
                q,
                k,
                v,
                documents,
                &seeded(options, *call, layer),
                layers.get(layer),
            )?),
        }
    }
}

/// `options` with the seed of one layer's call: no two calls of a run draw the same bits.
fn seeded(options: &Options, [step, micro_batch]: [u64; 2], layer: usize) -> Options {
    Options {
        seed: seed_of([options.seed, step, micro_batch, layer as u64]),
        ..*options
    }
}

fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: &Documents,
    mask: Mask,
) -> Result<Tensor, TchError> {
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
            let visible = visible(mask, rows.len() as i64, q.device())?;
            Tensor::f_scaled_dot_product_attention(
                &document(q)?,
                &document(k)?,
                &document(v)?,
                visible.as_ref(),
                0.0,
                mask == Mask::Causal,
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

/// The keys that each query of a document of `rows` rows sees, where torch has no word for it.
fn visible(mask: Mask, rows: i64, device: Device) -> Result<Option<Tensor>, TchError> {
    let Mask::Window(keys) = mask else {
        return Ok(None);
    };
    let up_to_itself = Tensor::f_ones([rows, rows], (Kind::Bool, device))?.f_tril(0)?;
    // `keys` may be more than i64 holds, and then reaches back to the first row all the same.
    let reach = i64::try_from(keys.get()).map_or(rows, |keys| keys.min(rows));
    Ok(Some(up_to_itself.f_triu(1 - reach)?))
}
