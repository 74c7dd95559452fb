//! What can end a run, and how it is told.

use std::error::Error;
use std::path::PathBuf;

use flamia_autograd::GpuCallError;
use tch::TchError;

use crate::atomic::WriteError;
use crate::batch::BatchError;
use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::device::DeviceError;
use crate::distributed::TeamError;
use crate::distributed::share::ShareError;
use crate::evaluate::EvaluateError;
use crate::model::ShapeError;
use crate::resume::Change;
use crate::run_folder::RunFolderError;
use crate::settings::SettingsError;
use crate::step::StepError;

/// What ended a run.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Its settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Its folder.
    #[error(transparent)]
    RunFolder(#[from] RunFolderError),
    /// Its device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Attention that the GPU has no kernel for.
    #[error("{0}\n  To have the host compute it, slowly: --kernel-backend host")]
    Gpu(#[from] Box<GpuCallError>),
    /// FlashAttention where there is no GPU.
    #[error(
        "attention flash is torch's FlashAttention 2, which runs on NVIDIA GPUs alone, and this run is \
         on the CPU: --attention sdpa is exact attention here"
    )]
    FlashOnCpu,
    /// The model it asks for.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Its data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Laying rows out.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Setting the model up.
    #[error("torch cannot set the model up")]
    Torch(#[from] TchError),
    /// Listening to Ctrl-C.
    #[error("cannot listen to Ctrl-C")]
    Signals(#[from] ctrlc::Error),
    /// Threads cannot be had.
    #[error("{asked} threads were asked for, but this process already computes with {running}")]
    Threads {
        /// Asked for.
        asked: usize,
        /// The pool's.
        running: usize,
    },
    /// The other ranks.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// Sharing a global batch out among ranks.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// One step.
    #[error("step {step} failed")]
    Step {
        /// The step, from 1.
        step: u64,
        /// Why.
        source: StepError,
    },
    /// Steps that are not finite, one after another.
    #[error(
        "the last {in_a_row} steps, up to step {step}, had a loss or gradient that is not finite: their \
         updates were left out, and the run stops with the state from before them saved as that of step {saved}. \
         A new run with a lower optim.lr, a longer optim.warmup or a lower optim.clip usually helps; this one \
         goes on with other rows by --resume, for {in_a_row} such steps at most"
    )]
    NotFinite {
        /// The last of them, from 1.
        step: u64,
        /// How many.
        in_a_row: u64,
        /// The step of the checkpoint.
        saved: u64,
    },
    /// An evaluation.
    #[error("the evaluation after step {step} failed")]
    Evaluate {
        /// Steps done.
        step: u64,
        /// Why.
        source: EvaluateError,
    },
    /// Saving or resuming.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A result's file.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The settings saved with a run, no longer what they were.
    #[error("cannot understand the run's saved settings {}", path.display())]
    SavedSettings {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A resumed run must not change what its result depends on.
    #[error(
        "a resumed run cannot change settings that its result depends on: {}. Resume without them, \
         or start a new run",
        changes.iter().map(Change::to_string).collect::<Vec<_>>().join("; ")
    )]
    Changed {
        /// Those that would change.
        changes: Vec<Change>,
    },
    /// `settings.toml` and the checkpoint disagree.
    #[error(
        "{} was changed since the checkpoint was saved, in settings that the result depends on: \
         restore it, or start a new run",
        path.display()
    )]
    SettingsEdited {
        /// The file.
        path: PathBuf,
    },
    /// Fewer steps than were done.
    #[error(
        "the run has done {done} steps, more than the {asked} it is to do now; give --steps {done} or more"
    )]
    FewerSteps {
        /// Done.
        done: u64,
        /// Asked for.
        asked: u64,
    },
}

/// An error and its causes on one line. A cause whose words its parent already told is left out.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let told = cause.to_string();
        if !text.contains(&told) {
            text = format!("{text}: {told}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_tells_every_cause_once() {
        let step = StepError::LossNotFinite { loss: f64::NAN };
        let told = chain(&TrainError::Step {
            step: 7,
            source: step,
        });
        assert!(told.starts_with("step 7 failed: the loss is NaN"), "{told}");

        let io = std::io::Error::other("disk full");
        let wrapped = WriteError {
            path: "x".into(),
            source: io,
        };
        assert_eq!(chain(&wrapped).matches("disk full").count(), 1);
    }
}
