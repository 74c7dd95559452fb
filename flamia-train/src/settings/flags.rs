//! The command line: one flag per setting, with help that teaches, and `--config`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Arg, Command, builder::NonEmptyStringValueParser, value_parser};

use super::error::SettingsError;
use super::key::{Key, Kind};
use super::layer::Layer;
use super::table::keys;

/// Clap's id of `--config`; no setting can have it, for its key would hold a dash.
const CONFIG: &str = "--config";

/// Clap's id of `--nproc`, which is for `cargo xtask train` and no setting.
const NPROC: &str = "--nproc";

const ABOUT: &str = "Trains a Llama on packed documents and shows how its loss falls.";

const LONG_ABOUT: &str = "\
Trains a Llama on packed documents, its attention in low bits, and shows how its loss falls.

Without any flag it trains a small model on text that this machine already has, in a few minutes \
and without a GPU. The run's folder receives TensorBoard events, checkpoints, the settings, a \
summary.json and a plot of the loss.

Every setting below can also stand in a TOML file given to --config, under the key shown with it, \
or in the environment variable shown. Flags win over the environment, the environment over the \
file, the file over --preset, a preset over the defaults.";

const EXAMPLES: &str = "\
Examples:
  Train with the defaults, then look at the same run with exact attention:
    cargo xtask train
    cargo xtask train --attention reference

  Train longer, into a folder of your choice, and continue after an interruption:
    cargo xtask train --steps 2000 --out runs/long
    cargo xtask train --resume --out runs/long

  Train on FineWeb-Edu shards with another tokenizer:
    cargo xtask train --data shards/ --tokenizer tokenizer.json

  Train a 77-million-parameter model on the bytes of your documents, on a GPU:
    cargo xtask train --preset byte-75m --data shards/ --attention flash

  Train with all GPUs of a machine, or with two processes on its CPU:
    cargo xtask train --nproc 8 --preset byte-75m --batch-accumulate 8 --data shards/
    cargo xtask train --nproc 2

  Train with several machines: torchrun and srun start the trainer itself, which `cargo xtask
  train` has built (MASTER_ADDR and MASTER_PORT set for srun; `cargo xtask env` sets libtorch up):
    torchrun --no-python --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \
      target/release/flamia-train --preset llama-1b --data shards/ --out runs/big
    srun --ntasks-per-node 8 target/release/flamia-train --preset llama-1b --data shards/ --out runs/big

  Keep settings in a file, and change one of them for a run:
    cat big.toml
      steps = 5000
      [model]
      dim = 512
      layers = 8
    FLAMIA_MODEL_LAYERS=12 cargo xtask train --config big.toml";

const NPROC_HELP: &str = "\
Start N ranks on this machine that train one model.

Each takes a GPU of its own, or a share of the cores, and an equal part of the rows of every step, which are \
batch.rows times batch.accumulate: the result does not depend on N but for rounding. Rank 0 writes the run's folder, \
and what other ranks say is shown behind their number. When one ends, all do; --resume takes any N. torchrun and SLURM \
start ranks too, without this flag: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are read, or \
SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID in place of the first three.

default: 1
no setting of a file or variable";

/// The command with every flag. `-h` shows the flags in a line each, `--help` explains them.
pub fn command() -> Command {
    let config = Arg::new(CONFIG)
        .long("config")
        .value_name("FILE.toml")
        .value_parser(value_parser!(PathBuf))
        .help_heading("Run")
        .help("A TOML file with settings");
    let nproc = Arg::new(NPROC)
        .long("nproc")
        .value_name("N")
        .value_parser(value_parser!(u16).range(1..))
        .help_heading("Several processes")
        .help("Start N ranks on this machine that train one model [default: 1]")
        .long_help(NPROC_HELP);
    Command::new("train")
        .bin_name("cargo xtask train")
        .version(env!("CARGO_PKG_VERSION"))
        .about(ABOUT)
        .long_about(LONG_ABOUT)
        .after_long_help(EXAMPLES)
        .arg(config)
        .args(keys().iter().map(flag))
        .arg(nproc)
}

fn flag(key: &'static Key) -> Arg {
    let arg = Arg::new(key.path)
        .long(key.flag.as_str())
        .help_heading(key.group)
        .help(short_help(key))
        .long_help(long_help(key))
        // `-1` is a value to refuse with a reason, not an unknown flag.
        .allow_negative_numbers(true)
        .value_parser(NonEmptyStringValueParser::new());
    match key.kind {
        Kind::Count => arg.value_name("N"),
        Kind::Real => arg.value_name("X"),
        Kind::Path => arg.value_name("PATH"),
        Kind::Switch => arg
            .value_name("BOOL")
            .num_args(0..=1)
            .default_missing_value("true"),
        Kind::Name { .. } => arg.value_name("NAME"),
    }
}

fn short_help(key: &Key) -> String {
    let sentence = key.help[0].trim_end_matches('.');
    match key.kind {
        Kind::Name { spellings, .. } => {
            format!(
                "{sentence} [{}; default: {}]",
                spellings().join(", "),
                key.default
            )
        }
        _ => format!("{sentence} [default: {}]", key.default),
    }
}

fn long_help(key: &Key) -> String {
    let mut paragraphs = key.help.clone();
    let mut facts = format!("default: {}", key.default);
    if let Kind::Name { spellings, .. } = key.kind {
        facts = format!("one of:  {}\n{facts}", spellings().join(", "));
    }
    paragraphs.push(format!(
        "{facts}\nin TOML: {}\nas env:  {}",
        key.path, key.variable
    ));
    paragraphs.join("\n\n")
}

/// What the command line says.
pub(super) struct Flags {
    pub(super) config: Option<PathBuf>,
    pub(super) layer: Layer,
}

pub(super) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Flags, SettingsError> {
    let matches = command().no_binary_name(true).try_get_matches_from(args)?;
    if matches.contains_id(NPROC) {
        let message = "--nproc is for `cargo xtask train`, which starts the ranks; torchrun and SLURM \
            count them themselves\n";
        return Err(command().error(ErrorKind::ArgumentConflict, message).into());
    }
    let mut layer = Layer::default();
    for key in keys() {
        if let Some(text) = matches.get_one::<String>(key.path) {
            layer.add_flag(key, text)?;
        }
    }
    Ok(Flags {
        config: matches.get_one::<PathBuf>(CONFIG).cloned(),
        layer,
    })
}

/// Splits `--nproc N` off `args`: the number of ranks to start, and what they are to be given.
///
/// # Errors
/// [`SettingsError::Usage`], for `--help` too.
pub fn split_nproc(args: &[OsString]) -> Result<(usize, Vec<OsString>), SettingsError> {
    let matches = command().no_binary_name(true).try_get_matches_from(args)?;
    let ranks = matches.get_one::<u16>(NPROC).copied();
    let mut rest = args.to_vec();
    // Clap has found it at most once, and no other flag takes it for a value.
    let is_it = |arg: &OsString| arg.to_string_lossy().split('=').next() == Some(NPROC);
    if let Some(at) = rest.iter().position(is_it) {
        let words = if rest[at] == NPROC { 2 } else { 1 };
        rest.drain(at..at + words);
    }
    Ok((ranks.map_or(1, usize::from), rest))
}
