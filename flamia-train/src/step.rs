//! One optimiser step: gradients of all micro-batches, clipping, AdamW.
//!
//! On the CPU the host looks at loss and gradient before the update. On a GPU it gives the device the
//! whole step and looks at what became of it when somebody wants a number: [`launch_step`] returns
//! before the step is done, and [`LaunchedStep::read`] waits for it. Either way, an update whose loss or
//! gradient is not finite is left out.

use flamia_autograd::distributed::DistributedError;
use tch::{Device, Kind, TchError, Tensor};

use crate::attention::Attention;
use crate::batch::MicroBatch;
use crate::loss::Loss;
use crate::model::{Model, ModelError};
use crate::optim::{AdamW, Guard, clip_global_norm, norm_on_device};

/// What a step did.
#[derive(Debug, Clone, Copy)]
pub struct StepReport {
    /// The training loss before the update.
    pub loss: Loss,
    /// The gradient's global norm before clipping.
    pub grad_norm: f64,
}

impl StepReport {
    /// Whether loss and gradient are numbers. If not, the update was left out: weights and moments are
    /// what they were.
    pub fn is_finite(&self) -> bool {
        self.loss.nats.is_finite() && self.grad_norm.is_finite()
    }
}

/// Why a step did not happen. Weights and moments are then what they were.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The forward pass.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Backward pass or update.
    #[error("torch refused the step")]
    Torch(#[from] TchError),
    /// Other ranks.
    #[error(transparent)]
    Distributed(#[from] DistributedError),
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

/// A step that a device was given, and may not have done yet.
#[derive(Debug)]
pub struct LaunchedStep {
    /// What the loss is summed over; no nats yet.
    pub counts: Loss,
    /// Summed loss and gradient norm, a Double of shape `[2]`.
    outcome: Tensor,
}

impl LaunchedStep {
    /// Keeps what a step will have done: its summed loss and its gradient's norm, Doubles of shape `[]`.
    ///
    /// # Errors
    /// When torch refuses.
    pub(crate) fn new(counts: Loss, nats: Tensor, norm: Tensor) -> Result<Self, TchError> {
        Ok(Self {
            counts,
            outcome: Tensor::f_stack(&[nats, norm], 0)?,
        })
    }

    /// Waits for the step and says what it did.
    ///
    /// # Errors
    /// [`StepError::Torch`].
    pub fn read(&self) -> Result<StepReport, StepError> {
        let outcome = Vec::<f64>::try_from(&self.outcome.f_to_device(Device::Cpu)?)?;
        let [nats, grad_norm] = outcome[..] else {
            unreachable!("the outcome is two numbers");
        };
        Ok(StepReport {
            loss: Loss {
                nats,
                ..self.counts
            },
            grad_norm,
        })
    }
}

/// Trains `model` on the micro-batches of one step, and waits for it.
///
/// # Errors
/// [`StepError`] of [`launch_step`] or [`LaunchedStep::read`], and for a step that is not finite.
pub fn train_step(
    model: &mut Model,
    optimizer: &mut AdamW,
    batches: &[MicroBatch],
    attention: &Attention,
    lr: f64,
    max_norm: f64,
) -> Result<StepReport, StepError> {
    let report = launch_step(model, optimizer, batches, attention, lr, max_norm)?.read()?;
    let (loss, norm) = (report.loss.per_token(), report.grad_norm);
    match report.is_finite() {
        true => Ok(report),
        false if loss.is_finite() => Err(StepError::NormNotFinite { norm, loss }),
        false => Err(StepError::LossNotFinite { loss }),
    }
}

/// Trains `model` on the micro-batches of one step; where the optimiser is guarded, as on a GPU,
/// without waiting for it.
///
/// Attention rounds at random, where it does, as belongs to the optimiser's count of steps and to
/// the place of a micro-batch: a step that is done again has the same bits.
///
/// # Errors
/// [`StepError`]. A loss or norm that is not finite is none: [`StepReport::is_finite`] tells it.
pub fn launch_step(
    model: &mut Model,
    optimizer: &mut AdamW,
    batches: &[MicroBatch],
    attention: &Attention,
    lr: f64,
    max_norm: f64,
) -> Result<LaunchedStep, StepError> {
    model.params.zero_grad();
    let counts: Loss = batches.iter().map(MicroBatch::counts).sum();
    let step = optimizer.step_count();
    let numbered: Vec<(u64, &MicroBatch)> = (0..).zip(batches).collect();
    let nats = accumulate(&numbered, counts.tokens, |(number, batch)| {
        Ok(batch.summed_loss(model, &attention.at(step, *number))?)
    })?;
    let norm = if optimizer.is_guarded() {
        let norm = norm_on_device(&model.params)?;
        let guard = Guard::new(&nats, &norm, max_norm)?;
        optimizer.update_guarded(&mut model.params, lr, &guard)?;
        norm
    } else {
        let norm = clip_global_norm(&model.params, max_norm)?;
        match nats.f_double_value(&[])?.is_finite() && norm.is_finite() {
            true => optimizer.update(&mut model.params, lr)?,
            false => optimizer.leave_out(),
        }
        Tensor::from(norm)
    };
    Ok(LaunchedStep::new(counts, nats, norm)?)
}

/// Adds up the gradients of the micro-batches' `summed_loss`, each divided by the `labels` of the
/// whole step, so that every label weighs the same in whichever micro-batch it lies. Returns the
/// sum of the losses, a Double of shape `[]` that the host has not waited for.
///
/// # Errors
/// [`StepError`] of `summed_loss` or of torch, or [`StepError::NoLabels`].
pub fn accumulate<B>(
    batches: &[B],
    labels: u64,
    mut summed_loss: impl FnMut(&B) -> Result<Tensor, StepError>,
) -> Result<Tensor, StepError> {
    if labels == 0 {
        return Err(StepError::NoLabels);
    }
    let mut total: Option<Tensor> = None;
    for batch in batches {
        let loss = summed_loss(batch)?;
        loss.f_div_scalar(labels as f64)?.f_backward()?;
        let nats = loss.f_detach()?.f_to_kind(Kind::Double)?;
        total = Some(match total {
            Some(total) => total.f_add(&nats)?,
            None => nats,
        });
    }
    total.ok_or(StepError::NoLabels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launched_step_tells_its_numbers_and_whether_they_are_any() {
        let launched = |outcome: [f64; 2]| LaunchedStep {
            counts: Loss {
                nats: 0.0,
                tokens: 10,
                bytes: 20,
            },
            outcome: Tensor::from_slice(&outcome),
        };
        let report = launched([30.0, 0.5]).read().unwrap();
        assert_eq!(
            (report.loss.per_token(), report.loss.per_byte()),
            (3.0, 1.5)
        );
        assert_eq!(report.grad_norm, 0.5);
        assert!(report.is_finite());
        for outcome in [[f64::NAN, 0.5], [30.0, f64::INFINITY]] {
            assert!(!launched(outcome).read().unwrap().is_finite());
        }
    }
}
