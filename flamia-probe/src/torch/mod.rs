//! Probes that need torch.

pub mod capture;
pub mod consistency;
mod sdpa;

use flamia_train::capture::CaptureError;
use flamia_train::step::StepError;
use tch::{Kind, TchError, Tensor};

use crate::error::ProbeError;

pub use sdpa::schemes;

/// The elements of a tensor, row-major.
fn read(tensor: &Tensor) -> Result<Vec<f32>, ProbeError> {
    let read = || -> Result<Vec<f32>, TchError> {
        let flat = tensor
            .f_to_device(tch::Device::Cpu)?
            .f_to_kind(Kind::Float)?
            .f_contiguous()?
            .f_reshape([-1])?;
        Vec::try_from(&flat)
    };
    read().map_err(|error| CaptureError::from(StepError::from(error)).into())
}
