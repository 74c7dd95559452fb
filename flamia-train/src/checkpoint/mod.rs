//! Checkpoints: everything a run needs to go on, whole or not at all.
//!
//! `checkpoints/step-000123/` holds `model.safetensors` (Hugging Face's names, f32),
//! `optimizer.safetensors` (AdamW's moments), `state.json` (the rest) and `MANIFEST.json` (size and
//! SHA-256 of the other three). A checkpoint is written in a hidden folder beside its place, every
//! file synced to disk, the manifest last, and then renamed: a folder called `step-*` was complete
//! when it got its name, and the manifest tells whether it still is. A [`Saver`] writes them in the
//! background.

mod background;
mod files;
mod folder;
mod state;
mod tensors;

use std::path::PathBuf;

pub use background::Saver;
pub(crate) use files::hex;
pub use folder::{Checkpoints, Newest, Skipped};
pub use state::{Measured, TrainState, Validation};
pub use tensors::{TensorProblem, load_tensors, write_tensors};

/// Why a checkpoint cannot be written, found or taken up.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Reading or copying tensors.
    #[error("torch refused a tensor of {}", path.display())]
    Torch {
        /// The file.
        path: PathBuf,
        /// What torch said.
        source: tch::TchError,
    },
    /// A file that is not what its name says.
    #[error("{} is not a safetensors file", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: safetensors::SafeTensorError,
    },
    /// Tensors that do not fit; nothing was loaded.
    #[error(
        "{} does not fit this model, so nothing was loaded: {}. Was it saved with other model settings?",
        path.display(), tensors::list(problems)
    )]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// Every tensor at fault.
        problems: Vec<TensorProblem>,
    },
    /// A JSON file that does not parse.
    #[error("cannot understand {}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A file whose content is not the one that was saved.
    #[error("{} is damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// Checkpoints, but none that is whole.
    #[error("no whole checkpoint in {}: {}", folder.display(), folder::list(skipped))]
    NoneWhole {
        /// The folder searched.
        folder: PathBuf,
        /// Those found, with what is wrong with them.
        skipped: Vec<Skipped>,
    },
}
