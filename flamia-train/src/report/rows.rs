//! The curves of runs as flat rows, for tables and other programs.

use serde::Serialize;

use super::{Along, RunRecord};
use crate::curves::{SPEED, TOKENS, TRAIN_LOSS, VAL_LOSS};

/// A run where its validation loss was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportRow {
    /// The run's name.
    pub run: String,
    /// Its attention.
    pub attention: String,
    /// Optimiser steps done.
    pub step: u64,
    /// The validation loss.
    pub val_loss: f64,
    /// That step's training loss, if it was logged.
    pub train_loss: Option<f64>,
    /// Label tokens trained on.
    pub tokens: Option<f64>,
    /// Label tokens per second up to that step, since the point before it.
    pub tokens_per_s: Option<f64>,
    /// The same in steps.
    pub steps_per_s: Option<f64>,
}

/// The rows of `runs`, run by run, in the order of steps.
pub fn rows(runs: &[RunRecord]) -> Vec<ReportRow> {
    runs.iter().flat_map(rows_of).collect()
}

fn rows_of(run: &RunRecord) -> Vec<ReportRow> {
    let at = |tag: &str, step: f64| {
        let curve = run.curve(tag, Along::Steps);
        let point = curve.into_iter().find(|point| point.0 == step);
        point.map(|(_, value)| value)
    };
    let measured = run.curve(VAL_LOSS, Along::Steps).into_iter();
    let row = |(step, val_loss): (f64, f64)| {
        let (tokens, tokens_per_s) = (at(TOKENS, step), at(SPEED, step));
        let tokens_per_step = tokens.map(|tokens| tokens / step);
        ReportRow {
            run: run.name.clone(),
            attention: run.settings.get("attention").cloned().unwrap_or_default(),
            step: step as u64,
            val_loss,
            train_loss: at(TRAIN_LOSS, step),
            tokens,
            tokens_per_s,
            steps_per_s: tokens_per_s
                .zip(tokens_per_step)
                .map(|(speed, tokens)| speed / tokens),
        }
    };
    measured.map(row).collect()
}
