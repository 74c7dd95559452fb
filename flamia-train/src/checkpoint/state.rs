//! What a checkpoint holds besides tensors.

use serde::{Deserialize, Serialize};

use crate::guard::GuardState;
use crate::summary::Versions;

/// The part of a run's state that is not tensors, as it stands between two steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Optimiser steps done, which is also the optimiser's own count.
    pub step: u64,
    /// Label tokens trained on.
    pub tokens: u64,
    /// Where the next training row comes from.
    pub data: datasets::Position,
    /// What the order and the contents of training rows depend on.
    pub data_identity: datasets::Identity,
    /// The seed all random numbers come from. They are drawn before the first step only, so the
    /// seed is the generator's whole state.
    pub seed: u64,
    /// Validation so far.
    pub validation: Validation,
    /// The last step's training loss.
    pub train_loss: Option<f64>,
    /// Seconds of training, over all resumptions.
    pub seconds: f64,
    /// Of these, seconds of steps: without evaluations and checkpoints.
    #[serde(default)]
    pub step_seconds: f64,
    /// Floating-point operations of the model in those steps.
    #[serde(default)]
    pub flops: f64,
    /// What is watched over its steps.
    #[serde(default)]
    pub guard: GuardState,
    /// SHA-256 of the settings that a resumed run must not change.
    pub settings_sha256: String,
    /// What wrote it.
    pub versions: Versions,
}

/// Validation losses, in the run's unit of loss.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Before the first step.
    pub first: Option<f64>,
    /// The last one and the step it belongs to.
    pub last: Option<Measured>,
    /// The lowest one and the step it belongs to.
    pub best: Option<Measured>,
}

/// A validation loss and the step after which it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Steps done.
    pub step: u64,
    /// The loss.
    pub loss: f64,
}

impl Validation {
    /// Takes a new loss in; says whether it is the lowest so far.
    pub fn record(&mut self, step: u64, loss: f64) -> bool {
        let measured = Measured { step, loss };
        self.first.get_or_insert(loss);
        self.last = Some(measured);
        let better = self.best.is_none_or(|best| loss < best.loss);
        if better {
            self.best = Some(measured);
        }
        better
    }
}
