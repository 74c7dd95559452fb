//! The folder of a run's checkpoints: saving, keeping and finding them.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::files::{self, MODEL, Manifest, OPTIMIZER, STATE, io};
use super::{CheckpointError, TrainState, load_tensors, write_tensors};
use crate::error::chain;
use crate::model::Params;
use crate::optim::AdamW;

/// Name of a folder being written or removed. Whatever carries it is garbage once its process is
/// gone.
const UNFINISHED: &str = ".unfinished-";

/// The checkpoints of one run. One process at a time may hold it.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep_last: usize,
}

/// A checkpoint that was passed over, and why.
#[derive(Debug)]
pub struct Skipped {
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What a search for the newest checkpoint found.
#[derive(Debug, Default)]
pub struct Newest {
    /// The newest whole one; `None` when there is none at all.
    pub whole: Option<PathBuf>,
    /// Newer ones that are not whole.
    pub skipped: Vec<Skipped>,
}

pub(super) fn list(skipped: &[Skipped]) -> String {
    let lines: Vec<String> = skipped
        .iter()
        .map(|s| format!("{} ({})", s.path.display(), s.reason))
        .collect();
    lines.join(", ")
}

impl Checkpoints {
    /// Opens `run/checkpoints`, creating it if need be, and clears away what killed saves left.
    ///
    /// `keep_last` (at least 1) is how many of the newest to keep besides the best.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn open(run: &Path, keep_last: usize) -> Result<Self, CheckpointError> {
        let folder = run.join("checkpoints");
        fs::create_dir_all(&folder).map_err(io("create", &folder))?;
        let checkpoints = Self {
            folder,
            keep_last: keep_last.max(1),
        };
        for name in checkpoints.names()? {
            if name.starts_with(UNFINISHED) {
                let path = checkpoints.folder.join(name);
                fs::remove_dir_all(&path).map_err(io("remove", &path))?;
            }
        }
        Ok(checkpoints)
    }

    /// The checkpoints of `run` to be read only: another process may be saving more, so nothing is cleared
    /// away.
    pub fn look(run: &Path) -> Self {
        Self {
            folder: run.join("checkpoints"),
            keep_last: 1,
        }
    }

    /// Whether there is any checkpoint, whole or not.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub fn is_empty(&self) -> Result<bool, CheckpointError> {
        Ok(self.steps()?.is_empty())
    }

    /// The folder that they are in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a checkpoint for `state.step` and then removes the ones that need not be kept.
    ///
    /// # Errors
    /// [`CheckpointError`]; the earlier checkpoints are then still there.
    pub fn save(
        &self,
        state: &TrainState,
        params: &Params,
        optimizer: &AdamW,
    ) -> Result<PathBuf, CheckpointError> {
        let model: Vec<_> = params
            .iter()
            .map(|(name, tensor)| (name.to_string(), tensor))
            .collect();
        self.write(state, &model, &optimizer.tensors(params))
    }

    /// [`Checkpoints::save`] of named tensors.
    pub(super) fn write(
        &self,
        state: &TrainState,
        model: &[(String, impl Borrow<Tensor>)],
        moments: &[(String, impl Borrow<Tensor>)],
    ) -> Result<PathBuf, CheckpointError> {
        let name = step_name(state.step);
        let unfinished = self.folder.join(format!("{UNFINISHED}{name}"));
        fs::create_dir_all(&unfinished).map_err(io("create", &unfinished))?;

        let mut manifest = Manifest::default();
        let file = write_tensors(named(model), &unfinished.join(MODEL))?;
        manifest.add(&unfinished, MODEL, &file)?;
        let file = write_tensors(named(moments), &unfinished.join(OPTIMIZER))?;
        manifest.add(&unfinished, OPTIMIZER, &file)?;
        manifest.add(
            &unfinished,
            STATE,
            &files::to_json(state, &unfinished.join(STATE))?,
        )?;
        manifest.seal(&unfinished)?;

        let path = self.folder.join(&name);
        if path.exists() {
            // Only a damaged one, which resuming passed over, can be in the way.
            self.remove(&name)?;
        }
        fs::rename(&unfinished, &path).map_err(io("rename", &unfinished))?;
        files::sync_folder(&self.folder)?;
        self.prune(state)?;
        Ok(path)
    }

    /// The newest whole checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError::NoneWhole`] when there are checkpoints and all are damaged.
    pub fn newest(&self) -> Result<Newest, CheckpointError> {
        let mut skipped = Vec::new();
        for (_, name) in self.steps()?.into_iter().rev() {
            let path = self.folder.join(name);
            match Manifest::verify(&path) {
                Ok(()) => {
                    return Ok(Newest {
                        whole: Some(path),
                        skipped,
                    });
                }
                Err(error) => skipped.push(Skipped {
                    path,
                    reason: chain(&error),
                }),
            }
        }
        if skipped.is_empty() {
            Ok(Newest {
                whole: None,
                skipped,
            })
        } else {
            Err(CheckpointError::NoneWhole {
                folder: self.folder.clone(),
                skipped,
            })
        }
    }

    /// Compares every file of the checkpoint `path` with its manifest.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when one is not what was saved, or another when one is missing.
    pub fn verify(path: &Path) -> Result<(), CheckpointError> {
        Manifest::verify(path)
    }

    /// The state in the checkpoint `path`, without its tensors.
    ///
    /// # Errors
    /// [`CheckpointError`] when it cannot be read.
    pub fn read_state(path: &Path) -> Result<TrainState, CheckpointError> {
        files::from_json(&path.join(STATE))
    }

    /// Takes up the weights and the optimiser's state from the checkpoint `path`.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] when they belong to another model.
    pub fn load(
        path: &Path,
        params: &Params,
        optimizer: &mut AdamW,
    ) -> Result<TrainState, CheckpointError> {
        let state = Self::read_state(path)?;
        Self::load_weights(path, params)?;
        load_tensors(optimizer.tensors(params), &path.join(OPTIMIZER))?;
        optimizer.restore_step_count(state.step);
        Ok(state)
    }

    /// Takes up the weights alone.
    ///
    /// # Errors
    /// As [`Checkpoints::load`].
    pub fn load_weights(path: &Path, params: &Params) -> Result<(), CheckpointError> {
        let model = params
            .iter()
            .map(|(name, tensor)| (name.to_string(), tensor));
        load_tensors(model, &path.join(MODEL))
    }

    fn prune(&self, state: &TrainState) -> Result<(), CheckpointError> {
        // Later ones are damaged ones that resuming passed over: they crowd out no whole one, and
        // are replaced when their step comes.
        let mut steps = self.steps()?;
        steps.retain(|(step, _)| *step <= state.step);
        let newest = steps
            .iter()
            .rev()
            .take(self.keep_last)
            .map(|(step, _)| *step);
        let best = state.validation.best.map(|best| best.step);
        let kept: BTreeSet<u64> = newest.chain(best).collect();
        for (step, name) in steps {
            if !kept.contains(&step) {
                self.remove(&name)?;
            }
        }
        Ok(())
    }

    /// Removes a checkpoint under an unfinished name, so that a kill in between leaves no half one.
    fn remove(&self, name: &str) -> Result<(), CheckpointError> {
        let path = self.folder.join(name);
        let doomed = self.folder.join(format!("{UNFINISHED}removal-of-{name}"));
        fs::rename(&path, &doomed).map_err(io("rename", &path))?;
        fs::remove_dir_all(&doomed).map_err(io("remove", &doomed))
    }

    /// Steps that have a checkpoint, in order, with its name.
    fn steps(&self) -> Result<Vec<(u64, String)>, CheckpointError> {
        let mut steps: Vec<(u64, String)> = self
            .names()?
            .into_iter()
            .filter_map(|name| Some((name.strip_prefix("step-")?.parse().ok()?, name)))
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        if !self.folder.exists() {
            // A run that has saved nothing yet.
            return Ok(Vec::new());
        }
        fs::read_dir(&self.folder)
            .and_then(|entries| {
                entries
                    .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                    .collect()
            })
            .map_err(io("list", &self.folder))
    }
}

fn named<T: Borrow<Tensor>>(tensors: &[(String, T)]) -> impl Iterator<Item = (String, &Tensor)> {
    tensors
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.borrow()))
}

fn step_name(step: u64) -> String {
    format!("step-{step:06}")
}
