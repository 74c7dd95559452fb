//! The command lines of `cargo xtask eval` and `cargo xtask generate`.
//!
//! Nothing here needs libtorch, so that `cargo xtask` can teach and check them before it is installed.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser};

use crate::settings::{Attention, Device};

/// The checkpoint that a command is about, and where to compute.
#[derive(Debug, Clone, Args)]
pub struct SavedArgs {
    /// A run's folder, for its newest whole checkpoint, or one checkpoint: RUN/checkpoints/step-000200
    #[arg(value_name = "RUN|CHECKPOINT")]
    pub path: PathBuf,
    /// The run's tokenizer.json, if it is no longer where the run found it
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    /// Where to compute: auto, cpu, cuda:0 and so on [default: the run's setting]
    #[arg(long, value_name = "NAME")]
    pub device: Option<Device>,
    /// CPU threads, 0 for all cores [default: the run's setting]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl SavedArgs {
    /// What is asked for, as flags of the trainer's.
    fn flags(&self) -> Vec<OsString> {
        let mut flags = Vec::new();
        add(&mut flags, "--tokenizer", self.tokenizer.as_ref());
        add(
            &mut flags,
            "--device",
            self.device.map(|device| device.to_string()),
        );
        add(
            &mut flags,
            "--threads",
            self.threads.map(|threads| threads.to_string()),
        );
        flags
    }
}

fn add(flags: &mut Vec<OsString>, flag: &str, value: Option<impl Into<OsString>>) {
    if let Some(value) = value {
        flags.extend([flag.into(), value.into()]);
    }
}

/// Measure a checkpoint's validation loss, and whether its attention leaks.
///
/// The loss and perplexity of a checkpoint on its run's validation rows, packed as in training, once through
/// the attention that the run trained with and once through exact attention. A kernel whose scales
/// leak later tokens into earlier ones lets the model look ahead: it then has a lower loss through that kernel
/// than through exact attention, which is what the difference tells (section 3.2 of the paper).
/// Rounding alone differs by little, in either direction: lower by more than 0.005 nats per token and three standard
/// errors is called a leak.
#[derive(Debug, Clone, Parser)]
#[command(name = "eval", bin_name = "cargo xtask eval", version, after_long_help = EVAL_EXAMPLES)]
pub struct EvalArgs {
    /// The checkpoint.
    #[command(flatten)]
    pub saved: SavedArgs,
    /// Other data than the run's; as in training, the share eval.fraction of it is evaluated on
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Another attention than the run's, to compare with exact attention
    #[arg(long, value_name = "NAME")]
    pub attention: Option<Attention>,
    /// The exact attention: reference (FP32, on the host), sdpa or flash (BF16, on a GPU)
    ///
    /// By default reference on the CPU; on a GPU flash, or sdpa for a sliding window or FP32.
    #[arg(long, value_name = "NAME", value_parser = exact)]
    pub exact: Option<Attention>,
    /// Validation rows to evaluate on [default: the run's eval.rows]
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Other settings that are to differ from the run's, as flags of `cargo xtask train`
    #[arg(last = true, value_name = "SETTINGS")]
    pub settings: Vec<OsString>,
}

const EVAL_EXAMPLES: &str = "\
Settings come from the run; what differs from them is named in the output.

Examples:
  The newest checkpoint of a run, and one checkpoint on the CPU:
    cargo xtask eval runs/a
    cargo xtask eval runs/a/checkpoints/step-000200 --device cpu

  Would another attention do for the same weights?
    cargo xtask eval runs/a --attention nvfp4

  Other text, all rows that there are, for a program to read:
    cargo xtask eval runs/a --data other.parquet --rows 100000 --json -- --eval-fraction 0.99

  What a kernel that leaks looks like:
    cargo xtask train --attention fp4 --kernel-ablate grouped-v --out runs/leaks
    cargo xtask eval runs/leaks";

fn exact(name: &str) -> Result<Attention, String> {
    match name {
        "reference" | "sdpa" | "flash" => name.parse().map_err(|error| format!("{error}")),
        _ => Err("exact attention is one of reference, sdpa, flash".into()),
    }
}

impl EvalArgs {
    /// What is to differ from the run's settings, as flags of the trainer's.
    #[must_use]
    pub fn changes(&self) -> Vec<OsString> {
        let mut flags = self.saved.flags();
        add(&mut flags, "--data", self.data.as_ref());
        add(
            &mut flags,
            "--attention",
            self.attention.map(|attention| attention.to_string()),
        );
        add(
            &mut flags,
            "--eval-rows",
            self.rows.map(|rows| rows.to_string()),
        );
        flags.extend(self.settings.iter().cloned());
        flags
    }
}

/// Let a checkpoint write on.
///
/// Text from a checkpoint, streamed to standard output as it is made; notes go to standard error. It ends where
/// the model ends the document, or after --tokens. Attention is exact, whichever the run trained with, and keys and values of
/// what was read are kept, so that each token costs one position of the model. One seed gives one text
/// on one device with one number of threads.
#[derive(Debug, Clone, Parser)]
#[command(name = "generate", bin_name = "cargo xtask generate", version, after_long_help = GENERATE_EXAMPLES)]
pub struct GenerateArgs {
    /// The checkpoint.
    #[command(flatten)]
    pub saved: SavedArgs,
    /// How the document begins; it is not printed again
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    pub prompt: String,
    /// The most tokens to write
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub tokens: usize,
    /// How freely to choose: logits are divided by it; 0 takes the likeliest token every time
    #[arg(long, value_name = "X", default_value_t = 0.8, value_parser = temperature)]
    pub temperature: f64,
    /// Choose among the N likeliest tokens only
    #[arg(long, value_name = "N")]
    pub top_k: Option<std::num::NonZero<usize>>,
    /// Choose among the likeliest tokens that have this probability together, after --top-k
    #[arg(long, value_name = "P", value_parser = probability)]
    pub top_p: Option<f64>,
    /// The seed of the choices
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

const GENERATE_EXAMPLES: &str = "\
Examples:
  cargo xtask generate runs/a --prompt 'pub fn '
  cargo xtask generate runs/a --prompt '# ' --temperature 0
  cargo xtask generate runs/a/checkpoints/step-000200 --top-p 0.9 --seed 7 --tokens 1000 > page.md";

impl GenerateArgs {
    /// What is to differ from the run's settings, as flags of the trainer's.
    #[must_use]
    pub fn changes(&self) -> Vec<OsString> {
        self.saved.flags()
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |value| value >= 0.0 && value.is_finite())
        .ok_or_else(|| "a temperature is a number, 0 or more".into())
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value <= 1.0)
        .ok_or_else(|| "it must be above 0 and at most 1".into())
}

fn number(text: &str, fits: impl Fn(f64) -> bool) -> Option<f64> {
    text.parse().ok().filter(|value| fits(*value))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        EvalArgs::command().debug_assert();
        GenerateArgs::command().debug_assert();
    }

    #[test]
    fn what_is_to_differ_becomes_the_trainers_flags() {
        let line = "eval runs/a --data d --attention nvfp4 --rows 7 --device cpu -- --kernel-c 3";
        let changes = EvalArgs::parse_from(line.split_whitespace()).changes();
        let expected = "--device cpu --data d --attention nvfp4 --eval-rows 7 --kernel-c 3";
        assert_eq!(changes, expected.split_whitespace().collect::<Vec<_>>());
        assert!(EvalArgs::parse_from(["eval", "a"]).changes().is_empty());
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for flags in [
            "--temperature -1",
            "--temperature NaN",
            "--top-p 0",
            "--top-p 1.5",
            "--top-k 0",
        ] {
            let line = ["generate", "a"].into_iter().chain(flags.split(' '));
            assert!(GenerateArgs::try_parse_from(line).is_err(), "{flags}");
        }
        assert!(EvalArgs::try_parse_from(["eval", "a", "--exact", "mxfp8"]).is_err());
        let args = GenerateArgs::parse_from(["generate", "a", "--prompt", "--- title"]);
        assert_eq!(args.prompt, "--- title");
    }
}
