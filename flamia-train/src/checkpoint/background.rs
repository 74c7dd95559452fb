//! Checkpoints that a thread writes while training goes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use tch::{Device, Kind, TchError, Tensor, no_grad};

use super::files::io;
use super::{CheckpointError, Checkpoints, TrainState};
use crate::model::Params;
use crate::optim::AdamW;

/// Saves checkpoints one after another. Training waits for the copy of its state to host memory alone;
/// serialising, hashing and syncing are a thread's.
#[derive(Debug)]
pub struct Saver {
    checkpoints: Arc<Checkpoints>,
    /// Where the state is copied to; the thread has it while it writes.
    copies: Option<Copies>,
    writing: Option<JoinHandle<Written>>,
}

type Written = (Copies, Result<PathBuf, CheckpointError>);

/// A run's tensors in host memory, by the names that files have for them.
#[derive(Debug)]
struct Copies {
    model: Vec<(String, Tensor)>,
    moments: Vec<(String, Tensor)>,
}

impl Saver {
    /// Saves among `checkpoints`.
    pub fn new(checkpoints: Checkpoints) -> Self {
        Self {
            checkpoints: Arc::new(checkpoints),
            copies: None,
            writing: None,
        }
    }

    /// Takes host memory for a copy of `params` and of the state of `optimizer`, pinned if they are on a GPU,
    /// so that the first checkpoint does not have to: that takes seconds for large models.
    ///
    /// # Errors
    /// [`CheckpointError::Torch`] when there is not so much.
    pub fn reserve(&mut self, params: &Params, optimizer: &AdamW) -> Result<(), CheckpointError> {
        let copies = Copies::like(params, optimizer);
        self.copies = Some(copies.map_err(|source| self.refused(source))?);
        Ok(())
    }

    fn refused(&self, source: TchError) -> CheckpointError {
        CheckpointError::Torch {
            path: self.checkpoints.folder().into(),
            source,
        }
    }

    /// Copies the state as it is now and has it written, after the checkpoint before is.
    ///
    /// # Errors
    /// [`CheckpointError`], that of the checkpoint before included: then this one is not written.
    pub fn save(
        &mut self,
        state: &TrainState,
        params: &Params,
        optimizer: &AdamW,
    ) -> Result<(), CheckpointError> {
        self.wait()?;
        let reserved = self.copies.take();
        let copies = reserved.map_or_else(|| Copies::like(params, optimizer), Ok);
        let copies = copies.and_then(|mut copies| {
            copies.take(params, optimizer)?;
            Ok(copies)
        });
        let copies = copies.map_err(|source| self.refused(source))?;
        let (checkpoints, state) = (Arc::clone(&self.checkpoints), state.clone());
        let write = move || {
            let written = checkpoints.write(&state, &copies.model, &copies.moments);
            (copies, written)
        };
        let thread = thread::Builder::new().name("checkpoint".into());
        let writing = thread.spawn(write);
        self.writing = Some(writing.map_err(io("start the writer of", self.checkpoints.folder()))?);
        Ok(())
    }

    /// Whether a checkpoint is being written.
    pub fn is_writing(&self) -> bool {
        self.writing
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// The failure of a checkpoint that is no longer being written. Waits for nothing.
    ///
    /// # Errors
    /// [`CheckpointError`], once.
    pub fn check(&mut self) -> Result<(), CheckpointError> {
        match self.is_writing() {
            true => Ok(()),
            false => self.wait(),
        }
    }

    /// Waits for the checkpoint that is being written, if one is.
    ///
    /// # Errors
    /// [`CheckpointError`] if it could not be; the earlier checkpoints are then still there.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        let Some(writing) = self.writing.take() else {
            return Ok(());
        };
        let (copies, written) = writing
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.copies = Some(copies);
        written.map(drop)
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // Who holds the run's folder must not let go of it before the last file is in place.
        if let Some(writing) = self.writing.take() {
            // A failure has nobody left to be told to, and a panic has said so.
            let _ = writing.join();
        }
    }
}

impl Copies {
    fn like(params: &Params, optimizer: &AdamW) -> Result<Self, TchError> {
        let like = |tensor: &Tensor| {
            let host = Tensor::f_empty(tensor.size(), (Kind::Float, Device::Cpu))?;
            match tensor.device() {
                device @ Device::Cuda(_) => host.f_pin_memory(device),
                _ => Ok(host),
            }
        };
        let model = params
            .iter()
            .map(|(name, tensor)| Ok((name.to_string(), like(tensor)?)));
        let moments = optimizer.tensors(params).into_iter();
        let moments = moments.map(|(name, tensor)| Ok((name, like(tensor)?)));
        Ok(Self {
            model: model.collect::<Result<_, TchError>>()?,
            moments: moments.collect::<Result<_, TchError>>()?,
        })
    }

    /// Copies the tensors, and waits until the copies are there.
    fn take(&mut self, params: &Params, optimizer: &AdamW) -> Result<(), TchError> {
        let moments = optimizer.tensors(params).into_iter().map(|(_, from)| from);
        let from = params.iter().map(|(_, from)| from).chain(moments);
        let to = self.model.iter_mut().chain(&mut self.moments);
        no_grad(|| {
            to.zip(from)
                .try_for_each(|((_, to), from)| to.f_copy_(from))
        })
    }
}
