//! Runs side by side: one HTML page that needs nothing else, or the loss curves alone as SVG.

mod page;
mod rows;
mod run;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::curves::{SPEED, TRAIN_LOSS, VAL_LOSS};
use crate::plot::{PlotError, Series, Style, chart};
use crate::tensorboard::EventError;

pub use page::page;
pub use rows::{ReportRow, rows};
pub use run::RunRecord;

/// Why runs cannot be reported.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A folder that is no run's.
    #[error("{} holds no run: it has no settings.toml", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
    },
    /// A file of a run that cannot be understood.
    #[error("cannot understand {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The parser's or the system's reason.
        reason: String,
    },
    /// Event files.
    #[error(transparent)]
    Events(#[from] EventError),
    /// A chart.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

/// What a chart has along its x axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Along {
    /// Optimiser steps.
    Steps,
    /// Label tokens trained on.
    Tokens,
}

impl Along {
    fn axis(self) -> &'static str {
        match self {
            Self::Steps => "step",
            Self::Tokens => "million tokens",
        }
    }
}

/// Training and validation losses of `runs` as an SVG. A run has one hue: thin and light for training,
/// bold and dark for validation. Points whose tokens were not recorded are left out along tokens.
///
/// # Errors
/// [`PlotError::Draw`].
pub fn loss_chart(runs: &[RunRecord], along: Along) -> Result<String, PlotError> {
    let series = runs.iter().flat_map(|run| {
        let curve = |tag, what, style| Series {
            name: format!("{}, {what}", run.name),
            points: run.curve(tag, along),
            style,
        };
        [
            curve(TRAIN_LOSS, "training", Style::Thin),
            curve(VAL_LOSS, "validation", Style::Bold),
        ]
    });
    let series: Vec<Series> = series.collect();
    chart("Loss", &series, [along.axis(), &y_axis(runs)])
}

/// How far the validation losses of `runs` are above the first one's, at the steps that both have:
/// what two curves that lie on one another do not show.
///
/// # Errors
/// [`PlotError::Draw`].
pub fn difference_chart(runs: &[RunRecord]) -> Result<String, PlotError> {
    let of = |run: &RunRecord| run.curve(VAL_LOSS, Along::Steps);
    let first: BTreeMap<u64, f64> = runs
        .iter()
        .take(1)
        .flat_map(of)
        .map(|(step, loss)| (step as u64, loss))
        .collect();
    let above = |(step, loss): (f64, f64)| Some((step, loss - first.get(&(step as u64))?));
    let series = runs.iter().map(|run| Series {
        name: run.name.clone(),
        points: of(run).into_iter().filter_map(above).collect(),
        style: Style::Bold,
    });
    let series: Vec<Series> = series.collect();
    let name = runs.first().map_or("", |run| &run.name);
    let title = format!("Validation loss above that of {name}");
    chart(&title, &series, ["step", &y_axis(runs)])
}

/// Thousands of tokens per second of `runs` as an SVG.
///
/// # Errors
/// [`PlotError::Draw`].
pub fn speed_chart(runs: &[RunRecord]) -> Result<String, PlotError> {
    let thousands = |(step, speed): (f64, f64)| (step, speed / 1e3);
    let series = runs.iter().map(|run| Series {
        name: run.name.clone(),
        points: run
            .curve(SPEED, Along::Steps)
            .into_iter()
            .map(thousands)
            .collect(),
        style: Style::Line,
    });
    let series: Vec<Series> = series.collect();
    chart("Throughput", &series, ["step", "thousand tokens/s"])
}

fn y_axis(runs: &[RunRecord]) -> String {
    let unit = runs.iter().find_map(RunRecord::unit);
    format!("loss ({})", unit.unwrap_or("nats"))
}
