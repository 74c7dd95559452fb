//! A checkpoint as something to use, whatever its run is doing: nothing in the run's folder is locked or
//! changed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use tch::Device;

use crate::checkpoint::{Checkpoints, Skipped, TrainState};
use crate::error::TrainError;
use crate::found::{Found, NotFound, find};
use crate::model::Model;
use crate::parts::empty_model;
use crate::resume::{self, Change};
use crate::run_folder::SETTINGS;
use crate::settings::Settings;
use crate::setup::saved_form;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// A path that is neither a run nor a checkpoint of one.
    #[error(
        "{} is neither the folder of a run, which has a {SETTINGS}, nor a checkpoint in one, such as \
         runs/NAME/checkpoints/step-000200",
        path.display()
    )]
    NoRun {
        /// The path.
        path: PathBuf,
    },
    /// A run that has saved nothing yet.
    #[error("{} has no checkpoint yet: train until it saves one", run.display())]
    NoCheckpoint {
        /// The run's folder.
        run: PathBuf,
    },
    /// Ids that mean something else to the model.
    #[error(
        "the checkpoint was trained with another tokenizer: its SHA-256 was {expected}, and {name} has \
         {found}; give --tokenizer the file that the run was trained with"
    )]
    Tokenizer {
        /// The one found.
        name: String,
        /// SHA-256 of the run's.
        expected: String,
        /// SHA-256 of the one found.
        found: String,
    },
    /// Settings, data, the device or the checkpoint itself.
    #[error(transparent)]
    Train(Box<TrainError>),
}

impl From<TrainError> for SavedError {
    fn from(error: TrainError) -> Self {
        Self::Train(error.into())
    }
}

/// A whole checkpoint and the settings to use it with.
#[derive(Debug)]
pub struct Saved {
    /// The checkpoint's folder.
    pub checkpoint: PathBuf,
    /// What it holds besides tensors.
    pub state: TrainState,
    /// The run's settings, with the asked changes.
    pub settings: Settings,
    /// Settings that differ from the run's.
    pub changes: Vec<Change>,
    /// Newer checkpoints that were passed over, and why.
    pub warnings: Vec<String>,
}

impl Saved {
    /// Finds the checkpoint at `path`, or the newest whole one of the run at `path`; `flags` of the
    /// trainer's stand above the run's settings.
    ///
    /// # Errors
    /// [`SavedError`]: there is none, it is damaged, or the settings do not go together.
    pub fn open(path: &Path, flags: &[OsString]) -> Result<Self, SavedError> {
        let found = find(path).map_err(|none| match none {
            NotFound::Run => SavedError::NoRun { path: path.into() },
            NotFound::Checkpoint => SavedError::NoCheckpoint { run: path.into() },
            NotFound::Unsound(error) => TrainError::from(error).into(),
        })?;
        let Found {
            run,
            checkpoint,
            skipped,
        } = found;
        let warning = |skipped: Skipped| {
            let Skipped { path, reason } = skipped;
            format!("skipped {}: {reason}", path.display())
        };
        let warnings = skipped.into_iter().map(warning).collect();
        let saved = run.join(SETTINGS);
        let load = |flags: &[OsString]| {
            Settings::load_resuming(&saved, flags.iter().cloned(), []).map_err(TrainError::from)
        };
        let (before, settings) = (load(&[])?, load(flags)?);
        Ok(Self {
            state: Checkpoints::read_state(&checkpoint).map_err(TrainError::from)?,
            changes: resume::differences(&saved_form(&before)?, &saved_form(&settings)?),
            checkpoint,
            settings,
            warnings,
        })
    }

    /// Refuses a tokenizer, called `name`, that is not the run's.
    ///
    /// # Errors
    /// [`SavedError::Tokenizer`].
    pub fn check_tokenizer(&self, name: &str, sha256: &str) -> Result<(), SavedError> {
        let expected = &self.state.data_identity.tokenizer;
        match sha256 == expected {
            true => Ok(()),
            false => Err(SavedError::Tokenizer {
                name: name.into(),
                expected: expected.clone(),
                found: sha256.into(),
            }),
        }
    }

    /// The model of `vocab` ids with the checkpoint's weights, on `device`.
    ///
    /// # Errors
    /// [`TrainError`] when they do not fit the settings.
    pub fn model(&self, vocab: usize, device: Device) -> Result<Model, TrainError> {
        let model = empty_model(&self.settings, vocab, device)?;
        Checkpoints::load_weights(&self.checkpoint, &model.params)?;
        Ok(model)
    }
}
