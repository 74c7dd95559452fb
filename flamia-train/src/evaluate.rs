//! The validation loss: the same rows every time, without gradients.

use tch::{TchError, no_grad_guard};

use crate::attention::Attention;
use crate::batch::MicroBatch;
use crate::loss::Loss;
use crate::model::{Model, ModelError};
use crate::stop::Stop;

/// Why an evaluation failed.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// The forward pass.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Reading the loss.
    #[error("torch refused the evaluation")]
    Torch(#[from] TchError),
}

/// The loss of `model` on all of `batches`, or `None` if the run was asked to stop meanwhile.
///
/// # Errors
/// [`EvaluateError`].
pub fn evaluate(
    model: &Model,
    batches: &[MicroBatch],
    attention: &Attention,
    stop: &Stop,
) -> Result<Option<Loss>, EvaluateError> {
    let _no_grad = no_grad_guard();
    let mut total = Loss::default();
    for batch in batches {
        if stop.asked() {
            return Ok(None);
        }
        let nats = batch.summed_loss(model, attention)?.f_double_value(&[])?;
        total = total
            + Loss {
                nats,
                ..batch.counts()
            };
    }
    Ok(Some(total))
}
