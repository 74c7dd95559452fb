//! What a run came to: `summary.json` for programs, a table for people.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use crate::atomic::{WriteError, atomic_write_with};
use crate::settings::{Ablate, Attention, Settings};

/// The result of a run and all that is needed to repeat it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// The attention that every layer called.
    pub attention: Attention,
    /// The defect that attention was given, `none` but for a study.
    pub ablate: Ablate,
    /// Optimiser steps done, over all resumptions.
    pub steps: usize,
    /// Validation loss before the first step.
    pub val_loss_first: Option<f64>,
    /// The last validation loss.
    pub val_loss: Option<f64>,
    /// The lowest validation loss.
    pub val_loss_best: Option<f64>,
    /// The last step's training loss.
    pub train_loss: Option<f64>,
    /// Steps whose loss or gradient was not finite, and whose update was left out.
    #[serde(default)]
    pub skipped_steps: u64,
    /// The longest that a checkpoint kept the steps waiting since the run was last started, in seconds.
    #[serde(default)]
    pub checkpoint_pause_s: Option<f64>,
    /// The unit of the losses, `nats/byte` or `nats/token`.
    pub unit: String,
    /// Tokens trained on, without padding, over all resumptions.
    pub tokens: u64,
    /// Tokens trained on per second of training, evaluation and checkpoints included.
    pub tokens_per_s: f64,
    /// Tokens trained on per second of the steps alone.
    pub step_tokens_per_s: Option<f64>,
    /// Floating-point operations of the model per second of the steps alone, in TFLOP/s.
    pub model_tflops: Option<f64>,
    /// `model_tflops` as a share of the device's BF16 rate, where that is given or known.
    pub utilisation: Option<f64>,
    /// Seconds of training, over all resumptions.
    pub seconds: f64,
    /// Trained numbers in the model.
    pub parameters: u64,
    /// Counts of documents, pieces, tokens and padding, as the data's loader reports them.
    pub data: BTreeMap<String, u64>,
    /// The seed.
    pub seed: u64,
    /// All settings.
    pub settings: Settings,
    /// What the run ran on.
    pub versions: Versions,
}

/// The software and hardware of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// This crate.
    pub flamia: String,
    /// The commit it was built from, if it was built in a git checkout.
    pub commit: Option<String>,
    /// The compiler that built it.
    pub rustc: String,
    /// The crate tch.
    pub tch: String,
    /// The libtorch that was loaded.
    pub torch: String,
    /// The name of the CPU or GPU.
    pub device: String,
    /// CPU threads.
    pub threads: usize,
}

impl Versions {
    /// The versions known to this build, with what only the running trainer knows.
    #[must_use]
    pub fn of_this_build(torch: String, device: String, threads: usize) -> Self {
        Self {
            flamia: env!("CARGO_PKG_VERSION").into(),
            commit: option_env!("BUILD_COMMIT").map(str::to_string),
            rustc: env!("BUILD_RUSTC").into(),
            tch: env!("BUILD_TCH").into(),
            torch,
            device,
            threads,
        }
    }
}

impl RunSummary {
    /// Writes the summary to `path`, atomically.
    ///
    /// # Errors
    /// [`WriteError`] if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), WriteError> {
        atomic_write_with(path, |writer| {
            serde_json::to_writer_pretty(&mut *writer, self)?;
            io::Write::write_all(writer, b"\n")
        })
    }

    /// Operations per second, and their share of what the device could do.
    fn speed(&self) -> String {
        match (self.model_tflops, self.utilisation) {
            (Some(tflops), Some(share)) => format!("{tflops:.1} ({:.1} %)", 100.0 * share),
            (Some(tflops), None) => format!("{tflops:.3}"),
            _ => "none".into(),
        }
    }

    /// The summary of the run in `folder` as a table.
    #[must_use]
    pub fn table(&self, folder: &Path) -> String {
        let loss = |loss: Option<f64>| match loss {
            Some(loss) => format!("{loss:.4} {}", self.unit),
            None => "none".into(),
        };
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        for (name, value) in [
            ("attention", self.attention.to_string()),
            ("steps", grouped(self.steps as u64)),
            ("validation loss, first", loss(self.val_loss_first)),
            ("validation loss, last", loss(self.val_loss)),
            ("validation loss, best", loss(self.val_loss_best)),
            ("training loss, last", loss(self.train_loss)),
            ("tokens", grouped(self.tokens)),
            ("tokens/s", grouped(self.tokens_per_s as u64)),
            ("time", duration(self.seconds)),
            ("model TFLOP/s", self.speed()),
            ("parameters", grouped(self.parameters)),
        ] {
            table.add_row([name, &value]);
        }
        if self.skipped_steps > 0 {
            table.add_row(["steps left out, not finite", &grouped(self.skipped_steps)]);
        }
        if self.ablate.0.is_some() {
            table.add_row(["ablate", &self.ablate.to_string()]);
        }
        for (name, count) in &self.data {
            table.add_row([format!("data: {name}"), grouped(*count)]);
        }
        table.add_row(["device", &self.versions.device]);
        table.add_row(["run", &folder.display().to_string()]);
        if let Some(values) = table.column_mut(1) {
            values.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }
}

/// `n` with its thousands set apart: 1 234 567.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// Seconds as `1 h 02 min 03 s`, without leading zero parts.
fn duration(seconds: f64) -> String {
    // Casts saturate: a negative or absurd estimate shows as 0 or as very long.
    let s = seconds.round() as u64;
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, min, s) => format!("{min} min {s:02} s"),
        (h, min, s) => format!("{h} h {min:02} min {s:02} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::cpu_name;

    fn summary() -> RunSummary {
        RunSummary {
            attention: Attention::Path(flamia_kernels::Path::Mxfp8),
            ablate: Ablate(Some(flamia_kernels::Ablation::UnquantisedD)),
            steps: 300,
            val_loss_first: Some(5.6021),
            val_loss: Some(2.4507),
            val_loss_best: Some(0.1 + 0.2),
            train_loss: None,
            skipped_steps: 1002,
            checkpoint_pause_s: Some(0.25),
            unit: "nats/byte".into(),
            tokens: 1_228_800,
            tokens_per_s: 8123.75,
            step_tokens_per_s: Some(9000.5),
            model_tflops: Some(247.25),
            utilisation: Some(0.25),
            seconds: 151.26,
            parameters: 2_800_000,
            data: BTreeMap::from([("documents".into(), 912), ("padding".into(), 1024)]),
            seed: 3,
            settings: Settings {
                seed: 3,
                ..Settings::default()
            },
            versions: Versions::of_this_build("2.11.0".into(), cpu_name(), 2),
        }
    }

    #[test]
    fn the_file_reads_back_to_the_same_summary_and_has_the_promised_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        summary().write(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            serde_json::from_str::<RunSummary>(&text).unwrap(),
            summary()
        );

        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["attention"], "mxfp8");
        assert_eq!(json["ablate"], "unquantised-d");
        assert_eq!(json["steps"], 300);
        assert_eq!(json["val_loss_first"], 5.6021);
        assert_eq!(json["val_loss"], 2.4507);
        assert_eq!(json["tokens_per_s"], 8123.75);
        assert_eq!(json["settings"]["model"]["kv_heads"], 1);
        assert_eq!(json["settings"]["kernel"]["profile"], "auto");
        assert_eq!(json["versions"]["torch"], "2.11.0");
        assert_eq!(json["versions"]["tch"], "0.24.0");
        assert!(
            json["versions"]["rustc"]
                .as_str()
                .unwrap()
                .starts_with("rustc 1.")
        );
    }

    #[test]
    fn the_table_shows_the_losses_with_their_unit() {
        let table = summary().table(Path::new("runs/a"));
        for (name, value) in [
            ("validation loss, first", "5.6021 nats/byte"),
            ("validation loss, last", "2.4507 nats/byte"),
            ("training loss, last", "none"),
            ("steps left out", "1 002"),
            ("tokens ", "1 228 800"),
            ("model TFLOP/s", "247.2 (25.0 %)"),
            ("time", "2 min 31 s"),
            ("data: documents", "912"),
            ("run", "runs/a"),
        ] {
            let line = table.lines().find(|line| line.contains(name));
            assert!(
                line.is_some_and(|line| line.contains(value)),
                "{name}\n{table}"
            );
        }
    }

    #[test]
    fn numbers_and_times_read_well() {
        let grouped: Vec<_> = [0, 999, 1000, 1_234_567].map(grouped).into();
        assert_eq!(grouped, ["0", "999", "1 000", "1 234 567"]);
        let times: Vec<_> = [0.4, 59.6, 3599.0, 3723.0, f64::NAN].map(duration).into();
        assert_eq!(
            times,
            ["0 s", "1 min 00 s", "59 min 59 s", "1 h 02 min 03 s", "0 s"]
        );
    }
}
