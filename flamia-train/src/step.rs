//! One optimiser step: gradients of all micro-batches, clipping, AdamW.

use tch::{TchError, Tensor};

use crate::attention::Attention;
use crate::batch::MicroBatch;
use crate::loss::Loss;
use crate::model::{Model, ModelError};
use crate::optim::{AdamW, clip_global_norm};

/// What a step did.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// The training loss before the update.
    pub loss: Loss,
    /// The gradient's global norm before clipping.
    pub grad_norm: f64,
}

/// Why a step did not happen. Weights, moments and step count are then what they were.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The forward pass.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Backward pass or update.
    #[error("torch refused the step")]
    Torch(#[from] TchError),
    /// Nothing to learn.
    #[error("the step's rows hold no token that is to be predicted")]
    NoLabels,
    /// The loss is NaN or infinite.
    #[error(
        "the loss is {loss}: the optimiser was not run. A lower optim.lr, a longer optim.warmup or \
         a lower optim.clip usually helps"
    )]
    LossNotFinite {
        /// The loss, per label token.
        loss: f64,
    },
    /// The gradient has a NaN or is too large for a number.
    #[error(
        "the gradient's norm is {norm} at a loss of {loss}: the optimiser was not run. A lower \
         optim.lr, a longer optim.warmup or a lower optim.clip usually helps"
    )]
    NormNotFinite {
        /// The norm.
        norm: f64,
        /// The loss, per label token.
        loss: f64,
    },
}

/// Trains `model` on the micro-batches of one step.
///
/// Attention rounds at random, where it does, as belongs to the optimiser's count of steps and to
/// the place of a micro-batch: a step that is done again has the same bits.
///
/// # Errors
/// [`StepError`]; a loss or norm that is not finite stops before the optimiser runs.
pub fn train_step(
    model: &mut Model,
    optimizer: &mut AdamW,
    batches: &[MicroBatch],
    attention: &Attention,
    lr: f64,
    max_norm: f64,
) -> Result<StepReport, StepError> {
    model.params.zero_grad();
    let labels = batches.iter().map(|batch| batch.label_tokens).sum();
    let step = optimizer.step_count();
    let numbered: Vec<(u64, &MicroBatch)> = (0..).zip(batches).collect();
    let nats = accumulate(&numbered, labels, |(number, batch)| {
        Ok(batch.summed_loss(model, &attention.at(step, *number))?)
    })?;
    let loss = Loss {
        nats,
        ..batches.iter().map(MicroBatch::counts).sum()
    };
    if !nats.is_finite() {
        return Err(StepError::LossNotFinite {
            loss: loss.per_token(),
        });
    }
    let grad_norm = clip_global_norm(&model.params, max_norm)?;
    if !grad_norm.is_finite() {
        return Err(StepError::NormNotFinite {
            norm: grad_norm,
            loss: loss.per_token(),
        });
    }
    optimizer.update(&mut model.params, lr)?;
    Ok(StepReport { loss, grad_norm })
}

/// Adds up the gradients of the micro-batches' `summed_loss`, each divided by the `labels` of the
/// whole step, so that every label weighs the same in whichever micro-batch it lies. Returns the
/// sum of the losses.
///
/// # Errors
/// [`StepError`] of `summed_loss` or of torch, or [`StepError::NoLabels`].
pub fn accumulate<B>(
    batches: &[B],
    labels: u64,
    mut summed_loss: impl FnMut(&B) -> Result<Tensor, StepError>,
) -> Result<f64, StepError> {
    if labels == 0 {
        return Err(StepError::NoLabels);
    }
    let mut total = 0.0;
    for batch in batches {
        let loss = summed_loss(batch)?;
        loss.f_div_scalar(labels as f64)?.f_backward()?;
        total += loss.f_double_value(&[])?;
    }
    Ok(total)
}
