//! What attention gets inside a model: one batch's activations and gradients, layer by layer.
//!
//! A capture is a safetensors file with, for each layer `N` from 0, `layerN.q` and `layerN.d_o`
//! `[T, H, E]`, `layerN.k` and `layerN.v` `[T, K, E]` in BF16, Q and K after their rotary embedding,
//! and `cu_seqlens` (I64): where each document of the `T` rows starts, and `T`. Its metadata tell the
//! run, the step, the attention, the hash of the run's settings and the versions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use flamia_sched::Documents;
use safetensors::tensor::{Dtype, TensorView, serialize};
use tch::{Device, Kind, TchError, Tensor};

use crate::atomic::{WriteError, atomic_write};
use crate::attention::{Attend, Attention, AttentionFailure};
use crate::batch::MicroBatch;
use crate::checkpoint::{Checkpoints, TrainState};
use crate::data::{DataError, validation_batches};
use crate::error::TrainError;
use crate::model::Model;
use crate::parts::Parts;
use crate::run_folder::RunFolder;
use crate::settings::Settings;
use crate::step::StepError;

/// Why a capture could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The run, its data or its checkpoint.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A run that has saved nothing yet.
    #[error("{} has no checkpoint yet: train until it saves one", run.display())]
    NoCheckpoint {
        /// The run's folder.
        run: PathBuf,
    },
    /// A run whose data gave no row to validate on.
    #[error(
        "the data has no validation row: give the run more documents, or a larger eval.fraction"
    )]
    NoRows,
    /// The forward or the backward pass.
    #[error("the captured step failed")]
    Step(#[from] StepError),
    /// Tensors that make no file.
    #[error("cannot lay out {}", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// The file.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// One layer's attention call and the gradient that came back to it.
#[derive(Debug)]
pub struct Layer {
    /// Queries, `[T, H, E]`.
    pub q: Tensor,
    /// Keys, `[T, K, E]`.
    pub k: Tensor,
    /// Values, `[T, K, E]`.
    pub v: Tensor,
    /// The gradient of the output, `[T, H, E]`.
    pub d_o: Tensor,
}

/// What attention got in one forward and backward pass.
#[derive(Debug)]
pub struct Activations {
    /// Where documents start and end.
    pub documents: Documents,
    /// Every layer's, in order, outside of torch's graph.
    pub layers: Vec<Layer>,
}

impl Activations {
    /// Runs `model` on `batch`, forward and backward. The loss is the mean over the batch's labels,
    /// as in a training step of this batch alone. No parameter's gradient changes.
    ///
    /// # Errors
    /// [`StepError`] of the passes, or when the batch has no label.
    pub fn of(
        model: &Model,
        batch: &MicroBatch,
        attention: &dyn Attend,
    ) -> Result<Self, StepError> {
        if batch.label_tokens == 0 {
            return Err(StepError::NoLabels);
        }
        let recorder = Recorder {
            attention,
            calls: RefCell::default(),
        };
        let loss = batch
            .summed_loss(model, &recorder)?
            .f_div_scalar(batch.label_tokens as f64)?;
        let calls = recorder.calls.into_inner();
        let outputs: Vec<&Tensor> = calls.iter().map(|call| &call.o).collect();
        let gradients = Tensor::f_run_backward(&[&loss], &outputs, false, false)?;
        let layers = calls.iter().zip(gradients);
        Ok(Self {
            documents: batch.documents().clone(),
            layers: layers
                .map(|(Call { q, k, v, .. }, d_o)| {
                    Ok(Layer {
                        q: q.f_detach()?,
                        k: k.f_detach()?,
                        v: v.f_detach()?,
                        d_o,
                    })
                })
                .collect::<Result<_, TchError>>()?,
        })
    }

    /// Writes the capture's file, whole or not at all.
    ///
    /// # Errors
    /// [`CaptureError`].
    pub fn write(
        &self,
        path: &Path,
        metadata: HashMap<String, String>,
    ) -> Result<(), CaptureError> {
        let boundaries = self.documents.cu_seqlens();
        let bytes = boundaries
            .iter()
            .flat_map(|&at| i64::from(at).to_le_bytes())
            .collect();
        let mut parts = vec![(
            "cu_seqlens".to_string(),
            Dtype::I64,
            vec![boundaries.len()],
            bytes,
        )];
        for (layer, Layer { q, k, v, d_o }) in self.layers.iter().enumerate() {
            for (name, tensor) in [("q", q), ("k", k), ("v", v), ("d_o", d_o)] {
                let shape = tensor.size().iter().map(|&n| n as usize).collect();
                let bytes = bf16_bytes(tensor).map_err(StepError::Torch)?;
                parts.push((format!("layer{layer}.{name}"), Dtype::BF16, shape, bytes));
            }
        }
        let layout = |source| CaptureError::Layout {
            path: path.into(),
            source,
        };
        let views = parts
            .iter()
            .map(|(name, dtype, shape, bytes)| {
                Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?))
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(layout)?;
        let file = serialize(views, Some(metadata)).map_err(layout)?;
        Ok(atomic_write(path, &file)?)
    }
}

/// Attention that keeps what it is called with.
struct Recorder<'a> {
    attention: &'a dyn Attend,
    calls: RefCell<Vec<Call>>,
}

struct Call {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
}

impl Attend for Recorder<'_> {
    fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
    ) -> Result<Tensor, AttentionFailure> {
        let o = self.attention.attend(layer, q, k, v, documents)?;
        self.calls.borrow_mut().push(Call {
            q: q.shallow_clone(),
            k: k.shallow_clone(),
            v: v.shallow_clone(),
            o: o.shallow_clone(),
        });
        Ok(o)
    }
}

/// A capture that was written.
#[derive(Debug)]
pub struct Captured {
    /// Steps that the checkpoint's model had been trained for.
    pub step: u64,
    /// The attention that the run trained with.
    pub attention: String,
    /// What was captured.
    pub activations: Activations,
}

/// Runs the newest whole checkpoint of `run` on one micro-batch of its validation rows, in the run's
/// own numerics, and writes the capture `out`.
///
/// # Errors
/// [`CaptureError`], for one when another process is training the run.
pub fn capture(run: &Path, out: &Path) -> Result<Captured, CaptureError> {
    let folder = RunFolder::open(run).map_err(TrainError::from)?;
    let settings = Settings::load_resuming(&folder.settings(), [], []).map_err(TrainError::from)?;
    let parts = Parts::new(&settings)?;
    let (model, mut optimizer) = parts.model(&settings)?;
    let checkpoints =
        Checkpoints::open(folder.path(), settings.checkpoint.keep).map_err(TrainError::from)?;
    let newest = checkpoints.newest().map_err(TrainError::from)?;
    let Some(checkpoint) = newest.whole else {
        return Err(CaptureError::NoCheckpoint { run: run.into() });
    };
    let state =
        Checkpoints::load(&checkpoint, &model.params, &mut optimizer).map_err(TrainError::from)?;
    parts
        .dataset
        .identity()
        .check(&state.data_identity)
        .map_err(|error| TrainError::from(DataError::from(error)))?;
    let batches = validation_batches(&parts.dataset, &settings, parts.device)?;
    let batch = batches.first().ok_or(CaptureError::NoRows)?;
    let attention = Attention::new(&settings).at(state.step, 0);
    let activations = Activations::of(&model, batch, &attention)?;
    activations.write(out, metadata(run, &settings, &state))?;
    Ok(Captured {
        step: state.step,
        attention: settings.attention.to_string(),
        activations,
    })
}

fn metadata(run: &Path, settings: &Settings, state: &TrainState) -> HashMap<String, String> {
    let versions = &state.versions;
    [
        ("format", "flamia-capture".to_string()),
        ("run", run.display().to_string()),
        ("step", state.step.to_string()),
        ("attention", settings.attention.to_string()),
        ("mask", settings.kernel.mask().to_string()),
        ("ablate", settings.kernel.ablate.to_string()),
        ("settings_sha256", state.settings_sha256.clone()),
        ("flamia", versions.flamia.clone()),
        ("commit", versions.commit.clone().unwrap_or_default()),
        ("torch", versions.torch.clone()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into()
}

fn bf16_bytes(tensor: &Tensor) -> Result<Vec<u8>, TchError> {
    let bits = tensor
        .f_to_device(Device::Cpu)?
        .f_to_kind(Kind::BFloat16)?
        .f_contiguous()?
        .f_view_dtype(Kind::Int16)?
        .f_reshape([-1])?;
    let bits: Vec<i16> = Vec::try_from(&bits)?;
    Ok(bits.iter().flat_map(|bits| bits.to_le_bytes()).collect())
}
