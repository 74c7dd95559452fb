//! `probe consistency`: training with the forward and backward passes at odds.

use serde::Serialize;

use crate::error::ProbeError;

/// Train with the forward and backward passes at odds
#[derive(Clone, Debug, clap::Args)]
pub struct Consistency {
    /// Optimiser steps of every run
    #[arg(long, default_value_t = 300)]
    pub steps: usize,
}

/// One measurement of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The defect switched on, if any.
    pub ablate: Option<String>,
    /// Optimiser steps done.
    pub step: usize,
}

impl Consistency {
    /// Trains every run.
    ///
    /// # Errors
    /// Always: this build has no training.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        Err(ProbeError::NeedsTorch {
            probe: "consistency",
        })
    }
}
