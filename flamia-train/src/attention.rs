//! Attention by name, in the one place where the model calls it.

use std::sync::{Arc, Mutex, PoisonError};

use flamia_autograd::{AttentionError, FlashDocuments, FlashError, flash_attention};
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
    /// torch's FlashAttention 2.
    #[error(transparent)]
    Flash(#[from] FlashError),
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
    /// torch's FlashAttention 2 in BF16, on packed documents on a GPU: the baseline in speed.
    Flash {
        /// The boundaries of the last call, which the layers of a micro-batch share.
        last: Arc<Mutex<Option<FlashDocuments>>>,
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
            settings::Attention::Flash => Self::Flash {
                last: Arc::default(),
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
                .map(|(layer, stats)| (layer, stats.take()))
                // A GPU's kernels count nothing, and a curve of zeros would say that nothing was lost.
                .filter(|(_, counts)| counts.ds_nonzero > 0)
                .flat_map(|(layer, counts)| {
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
            Self::Flash { last } => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                let device = q.device();
                let known = match last.take() {
                    Some(known) if known.is_of(documents, device) => known,
                    _ => FlashDocuments::new(documents, device)?,
                };
                Ok(flash_attention(q, k, v, last.insert(known))?)
            }
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

/// torch's attention, one document at a time; shapes as in [`Attend::attend`].
pub(crate) fn sdpa(
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use flamia_kernels::Path;

    use super::*;

    fn settings(attention: &str, window: usize) -> Settings {
        let mut settings = Settings {
            attention: attention.parse().unwrap(),
            ..Settings::default()
        };
        settings.kernel.window = window;
        settings
    }

    #[test]
    fn steps_micro_batches_and_layers_draw_apart() {
        let attention = Attention::new(&settings("fp4", 0));
        let mut seeds = BTreeSet::new();
        for (step, micro_batch) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)] {
            let at = || attention.at(step, micro_batch);
            let Attention::Flamia { options, call, .. } = at() else {
                panic!("fp4 is this project's");
            };
            assert_eq!(options.path, Path::Fp4);
            for layer in 0..4 {
                let seed = seeded(&options, call, layer).seed;
                assert!(
                    seeds.insert(seed),
                    "step {step}, {micro_batch}, layer {layer}"
                );
            }
        }

        // And the kernels hear of it: dK, the one operand that is rounded at random, differs.
        let documents = Documents::from_lengths(&[150, 50]).unwrap();
        tch::manual_seed(1);
        let [q, k, v] = [0; 3].map(|_| {
            Tensor::randn([200, 2, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true)
        });
        let gradients = |step, micro_batch, layer| {
            let at = attention.at(step, micro_batch);
            let o = at.attend(layer, &q, &k, &v, &documents).unwrap();
            let loss = (&o * &q).sum(Kind::Float);
            let mut of = Tensor::run_backward(&[loss], &[&q, &k, &v], false, false);
            (of.swap_remove(1), o)
        };
        let (dk, o) = gradients(3, 1, 2);
        assert!(dk.equal(&gradients(3, 1, 2).0));
        // Of what was counted there are curves, and of no other layer.
        let curves = attention.take_statistics();
        let tags: Vec<_> = curves.iter().map(|(tag, _)| tag.as_str()).collect();
        assert_eq!(
            tags,
            [
                "attention/layer2/ds_flush_fraction",
                "attention/layer2/saturated"
            ]
        );
        assert!(attention.take_statistics().is_empty());
        for (step, micro_batch, layer) in [(4, 1, 2), (3, 0, 2), (3, 1, 3)] {
            let (other, same) = gradients(step, micro_batch, layer);
            assert!(
                !dk.equal(&other) && o.equal(&same),
                "{step} {micro_batch} {layer}"
            );
        }
    }

    #[test]
    fn torchs_attention_slides_its_window_as_ours_does() {
        let documents = Documents::from_lengths(&[70, 0, 1, 33]).unwrap();
        tch::manual_seed(2);
        let [q, k, v] = [4, 2, 2].map(|heads| {
            Tensor::randn([104, heads, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true)
        });
        let mut outputs = Vec::new();
        for window in [0, 1, 7, 33, 70, usize::MAX] {
            let run = |name| {
                let attention = Attention::new(&settings(name, window));
                let o = attention.attend(0, &q, &k, &v, &documents).unwrap();
                let loss = (&o * &o).sum(Kind::Float);
                (
                    o,
                    Tensor::run_backward(&[loss], &[&q, &k, &v], false, false),
                )
            };
            let ((o, d), (ours, our_d)) = (run("sdpa"), run("reference"));
            assert!(o.allclose(&ours, 1e-4, 1e-5, false), "window {window}");
            for (d, our_d) in d.iter().zip(&our_d) {
                assert!(d.allclose(our_d, 1e-3, 1e-4, false), "window {window}");
            }
            outputs.push(o);
        }
        // One key is the token's own value; all keys are the causal mask.
        let own = v.repeat_interleave_self_int(2, 1, None);
        assert!(outputs[1].allclose(&own, 1e-6, 1e-6, false));
        assert!(!outputs[2].allclose(&outputs[0], 1e-2, 1e-2, false));
        assert!(outputs[4].allclose(&outputs[0], 1e-6, 1e-6, false));
    }
}
