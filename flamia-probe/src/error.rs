//! Why a probe gave no result.

use std::path::PathBuf;

use flamia_kernels::AttentionError;
use flamia_sched::DocumentsError;
use flamia_train::atomic::WriteError;
use flamia_train::plot::PlotError;

/// Why a probe gave no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The attention under test refused the call.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Document boundaries that do not fit.
    #[error(transparent)]
    Documents(#[from] DocumentsError),
    /// A setting outside what the probe can do.
    #[error("{setting} is {found}: {expected}")]
    Setting {
        /// Which setting.
        setting: &'static str,
        /// Its value.
        found: String,
        /// What is possible.
        expected: String,
    },
    /// A capture that cannot be read.
    #[error("cannot read the capture {}: {reason}", path.display())]
    Capture {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Results that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A plot that cannot be drawn or written.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// A probe that this build lacks.
    #[error(
        "`{probe}` needs torch: `cargo xtask probe {probe}` sets it up, or build flamia-probe with \
         `--features torch`"
    )]
    NeedsTorch {
        /// Which one.
        probe: &'static str,
    },
    /// A run that cannot be set up or trained.
    #[cfg(feature = "torch")]
    #[error("{}", flamia_train::error::chain(.0))]
    Train(Box<flamia_train::error::TrainError>),
    /// A run whose activations cannot be had.
    #[cfg(feature = "torch")]
    #[error("{}", flamia_train::error::chain(.0))]
    Activations(Box<flamia_train::capture::CaptureError>),
    /// Attention from outside that failed.
    #[error("the attention under test failed: {0}")]
    Foreign(Box<dyn std::error::Error + Send + Sync>),
}

#[cfg(feature = "torch")]
impl From<flamia_train::error::TrainError> for ProbeError {
    fn from(error: flamia_train::error::TrainError) -> Self {
        Self::Train(error.into())
    }
}

#[cfg(feature = "torch")]
impl From<flamia_train::capture::CaptureError> for ProbeError {
    fn from(error: flamia_train::capture::CaptureError) -> Self {
        Self::Activations(error.into())
    }
}
