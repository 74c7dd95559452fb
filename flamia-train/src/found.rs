//! The checkpoint that a path means: one of a run, or a run's newest. Another process may be training the run.

use std::path::{Path, PathBuf};

use crate::checkpoint::{CheckpointError, Checkpoints, Skipped};
use crate::run_folder::SETTINGS;

/// A whole checkpoint.
pub(crate) struct Found {
    /// The folder of its run.
    pub run: PathBuf,
    /// Its own.
    pub checkpoint: PathBuf,
    /// Newer ones that are damaged.
    pub skipped: Vec<Skipped>,
}

/// Why there is none.
pub(crate) enum NotFound {
    /// The path is neither a run nor a checkpoint of one.
    Run,
    /// The run has saved nothing yet.
    Checkpoint,
    /// What there is cannot be read, or is damaged.
    Unsound(CheckpointError),
}

impl From<CheckpointError> for NotFound {
    fn from(error: CheckpointError) -> Self {
        Self::Unsound(error)
    }
}

/// The newest whole checkpoint of the run `path`, or the checkpoint `path`.
pub(crate) fn find(path: &Path) -> Result<Found, NotFound> {
    if path.join(SETTINGS).exists() {
        let newest = Checkpoints::look(path).newest()?;
        return Ok(Found {
            run: path.to_path_buf(),
            checkpoint: newest.whole.ok_or(NotFound::Checkpoint)?,
            skipped: newest.skipped,
        });
    }
    let absolute = path.canonicalize().map_err(|_| NotFound::Run)?;
    let run = absolute.ancestors().nth(2);
    let run = run.filter(|run| run.join(SETTINGS).exists());
    let run = run.ok_or(NotFound::Run)?.to_path_buf();
    Checkpoints::verify(path)?;
    Ok(Found {
        run,
        checkpoint: path.to_path_buf(),
        skipped: Vec::new(),
    })
}
