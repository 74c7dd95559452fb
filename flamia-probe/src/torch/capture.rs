//! `probe capture`: a checkpoint's activations as attention got them.

use std::path::PathBuf;

use flamia_train::capture::capture;
use serde::Serialize;

use crate::error::ProbeError;
use crate::metric::largest;

use super::read;

/// Write what attention gets inside a trained model, for the other probes to read
///
/// Runs the newest checkpoint of a run on one batch of its validation documents, forward and
/// backward, in the numerics that the run trained with. The file holds Q and K (after their rotary
/// embedding), V and dO of every layer in BF16; give it to other probes as `--input capture:FILE`.
/// Trained attention differs from Gaussian noise where it matters: its scores are uneven and its
/// gradients span many powers of two (paper, sections 4.2 and 4.5).
#[derive(Clone, Debug, clap::Args)]
pub struct Capture {
    /// The run's folder, such as runs/20261130-101500-mxfp8
    pub run: PathBuf,

    /// The file to write [default: capture.safetensors in the run's folder]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// One layer that was captured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The file.
    pub file: String,
    /// Steps that the model had been trained for.
    pub step: u64,
    /// The attention that it was trained with.
    pub attention: String,
    /// The layer, from 0.
    pub layer: usize,
    /// Rows of the packed batch.
    pub rows: usize,
    /// Its documents, padding counted as one of each packed row that has any.
    pub documents: usize,
    /// The largest magnitude in Q.
    pub q: f64,
    /// The largest magnitude in K.
    pub k: f64,
    /// The largest magnitude in V.
    pub v: f64,
    /// The largest magnitude in dO.
    pub d_o: f64,
}

impl Capture {
    /// Writes the capture and describes it, a row for each layer.
    ///
    /// # Errors
    /// A run that cannot be read or has no checkpoint, a file that cannot be written.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        let out = match &self.out {
            Some(out) => out.clone(),
            None => self.run.join("capture.safetensors"),
        };
        let captured = capture(&self.run, &out)?;
        let documents = &captured.activations.documents;
        let layers = captured.activations.layers.iter().enumerate();
        layers
            .map(|(layer, tensors)| {
                let most = |x| read(x).map(|x| largest(x.into_iter().map(f64::from)));
                Ok(Row {
                    file: out.display().to_string(),
                    step: captured.step,
                    attention: captured.attention.clone(),
                    layer,
                    rows: documents.total(),
                    documents: documents.iter().count(),
                    q: most(&tensors.q)?,
                    k: most(&tensors.k)?,
                    v: most(&tensors.v)?,
                    d_o: most(&tensors.d_o)?,
                })
            })
            .collect()
    }
}
