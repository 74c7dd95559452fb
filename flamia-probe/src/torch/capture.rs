//! `probe capture`: a checkpoint's activations as attention got them.

use std::path::PathBuf;

use crate::error::ProbeError;

/// Write a checkpoint's activations, for the other probes to read
#[derive(Clone, Debug, clap::Args)]
pub struct Capture {
    /// The folder of the run
    pub run: PathBuf,
}

impl Capture {
    /// Writes the capture.
    ///
    /// # Errors
    /// Always: this build has no capture.
    pub fn run(&self) -> Result<(), ProbeError> {
        Err(ProbeError::NeedsTorch { probe: "capture" })
    }
}
