//! What is watched over a run: steps that are not finite, and jumps of the loss or the gradient's norm.
//!
//! The device leaves the update of a step out that is not finite; here such steps are counted. A step
//! that stands out is reported in `spikes/` of the run's folder, with the documents it learnt from. Losses are
//! read late, so the rows of a step ([`KeptRow`]) wait for them.

mod recent;
mod report;
mod rows;

use std::fs;
use std::path::{Path, PathBuf};

use datasets::Dataset;
use serde::{Deserialize, Serialize};

pub use recent::{Level, Recent};
pub use rows::KeptRow;

use crate::atomic::WriteError;
use crate::error::chain;
use crate::settings::GuardSettings;
use crate::step::StepReport;
use report::{Reading, Report};

/// The folder of reports in a run's folder.
const FOLDER: &str = "spikes";

/// What a run remembers of its steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GuardState {
    /// Steps whose loss or gradient was not finite, over all resumptions.
    pub skipped: u64,
    /// Of these, the last ones without another in between.
    pub in_a_row: u64,
    /// The last finite losses.
    pub losses: Recent,
    /// The gradient's last finite norms.
    pub grad_norms: Recent,
    /// Whether the last step stood out: a jump that lasts is one.
    pub stands_out: bool,
}

/// A step whose numbers have been read.
#[derive(Debug)]
pub struct ReadStep<'a> {
    /// The step, from 1.
    pub step: u64,
    /// Its learning rate.
    pub lr: f64,
    /// Its numbers.
    pub report: &'a StepReport,
    /// The unit of the loss per byte.
    pub unit: &'static str,
    /// Its rows, by micro-batch.
    pub batch: &'a [Vec<KeptRow>],
}

/// Watches over the steps of a run.
pub struct Watch {
    settings: GuardSettings,
    folder: PathBuf,
    /// Has the tokenizer.
    dataset: Dataset,
}

impl Watch {
    /// Watches over the run in the folder `run` that learns from `dataset`.
    pub fn new(settings: GuardSettings, run: &Path, dataset: Dataset) -> Self {
        Self {
            settings,
            folder: run.join(FOLDER),
            dataset,
        }
    }

    /// Whether rows are wanted for reports.
    pub fn wants_rows(&self) -> bool {
        self.settings.spike_reports > 0
    }

    /// Whether so many steps in a row were not finite that the run is to stop.
    pub fn stops(&self, state: &GuardState) -> bool {
        state.in_a_row >= self.settings.skip_limit as u64
    }

    /// Takes a step in. If it stands out and is the first to do so, or the first that is not finite, reports
    /// it and says so in a line.
    pub fn take(&self, state: &mut GuardState, step: &ReadStep<'_>) -> Option<String> {
        let GuardSettings {
            spike_window: window,
            spike_factor: factor,
            ..
        } = self.settings;
        let reading = |value, recent: &Recent| Reading {
            value,
            usual: recent.level(window, factor),
        };
        let loss = reading(step.report.loss.per_byte(), &state.losses);
        let grad_norm = reading(step.report.grad_norm, &state.grad_norms);
        let finite = step.report.is_finite();
        if finite {
            state.in_a_row = 0;
            state.losses.push(loss.value, window);
            state.grad_norms.push(grad_norm.value, window);
        } else {
            state.skipped += 1;
            state.in_a_row += 1;
        }
        let reasons: Vec<&'static str> = [
            ("not finite", !finite),
            ("loss", loss.is_jump()),
            ("grad_norm", grad_norm.is_jump()),
        ]
        .into_iter()
        .filter_map(|(reason, holds)| holds.then_some(reason))
        .collect();
        let stood_out = std::mem::replace(&mut state.stands_out, !reasons.is_empty());
        let begins = match finite {
            true => !reasons.is_empty() && !stood_out,
            false => state.in_a_row == 1,
        };
        if !begins || self.settings.spike_reports == 0 {
            return None;
        }
        let report = Report {
            step: step.step,
            reasons: &reasons,
            unit: step.unit,
            loss,
            grad_norm,
            lr: step.lr,
            spike_window: window,
            spike_factor: factor,
            micro_batches: report::rows(self.dataset.tokenizer(), step.batch),
        };
        let path = self.folder.join(file_name(step.step));
        let written = match self.write(&report, &path) {
            Ok(()) => format!("its documents are in {}", path.display()),
            Err(error) => format!("no report of its documents: {}", chain(&error)),
        };
        Some(format!("{}; {written}", report.words()))
    }

    /// Writes `report` to `path` and removes the oldest ones that are too many.
    fn write(&self, report: &Report<'_>, path: &Path) -> Result<(), WriteError> {
        let failed = |source| WriteError {
            path: path.into(),
            source,
        };
        fs::create_dir_all(&self.folder).map_err(failed)?;
        report.write(path)?;
        let mut others: Vec<u64> = fs::read_dir(&self.folder)
            .map_err(failed)?
            .filter_map(|entry| step_of(&entry.ok()?.file_name().to_string_lossy()))
            .filter(|step| *step != report.step)
            .collect();
        others.sort_unstable();
        let too_many = (others.len() + 1).saturating_sub(self.settings.spike_reports);
        others.iter().take(too_many).try_for_each(|step| {
            fs::remove_file(self.folder.join(file_name(*step))).map_err(failed)
        })
    }
}

fn file_name(step: u64) -> String {
    format!("step-{step:06}.json")
}

/// The step whose report has this name.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?
        .strip_suffix(".json")?
        .parse()
        .ok()
}
