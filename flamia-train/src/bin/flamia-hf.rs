//! `cargo xtask export` and `cargo xtask import`: models to and from Hugging Face's Llama folders.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use flamia_train::error::chain;
use flamia_train::hugging_face::{ExportOptions, ExportType, HuggingFaceError, export, import};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Write a checkpoint as a Hugging Face folder, which transformers loads
    ///
    /// The folder gets model.safetensors, config.json (LlamaForCausalLM), tokenizer.json with
    /// tokenizer_config.json, generation_config.json and a README. It is written beside its place and
    /// renamed when it is whole. The run may be going on.
    #[command(after_long_help = EXPORT_EXAMPLES)]
    Export(ExportArgs),
    /// Make a run of a Hugging Face Llama folder, to be trained further
    ///
    /// The run begins at step 0 with the folder's weights (safetensors in one file or in shards; F32, BF16
    /// or F16, kept in F32 from here on) and a fresh optimiser. Sizes come from its config.json and
    /// the tokenizer from its tokenizer.json. What this trainer's model does not have (scaled rotary
    /// embeddings, biases, other activations) is refused by name.
    ///
    /// A run's settings stay as they are when it goes on, so those of the training to come are given here,
    /// as flags of `cargo xtask train`: --data, --optim-lr, --attention and so on.
    #[command(after_long_help = IMPORT_EXAMPLES)]
    Import(ImportArgs),
}

const EXPORT_EXAMPLES: &str = "\
Examples:
  The newest checkpoint of a run, in BF16:
    cargo xtask export runs/a exports/a

  A certain checkpoint, bit for bit as it was trained:
    cargo xtask export runs/a/checkpoints/step-000800 exports/a-800 --dtype f32";

const IMPORT_EXAMPLES: &str = "\
Examples:
  Train a downloaded model further on your documents:
    cargo xtask import Llama-folder runs/further --data shards/ --optim-lr 1e-4 --steps 500
    cargo xtask train --resume --out runs/further";

#[derive(Args)]
struct ExportArgs {
    /// A run's folder, whose newest whole checkpoint is taken, or the folder of a checkpoint
    #[arg(value_name = "RUN|CHECKPOINT")]
    from: PathBuf,
    /// The folder to write
    out: PathBuf,
    /// What to write weights in
    #[arg(long, value_enum, default_value_t)]
    dtype: ExportType,
    /// Replace a model's folder that is there
    #[arg(long)]
    force: bool,
    /// The run's tokenizer.json, if it is no longer where the run had it
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

#[derive(Args)]
struct ImportArgs {
    /// The Hugging Face folder
    #[arg(value_name = "HF_DIR")]
    from: PathBuf,
    /// The folder of the new run
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// Flags of `cargo xtask train` for the run
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "SETTINGS"
    )]
    settings: Vec<OsString>,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Export(args) => export_run(args),
        Task::Import(args) => import_folder(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(HuggingFaceError::Settings(error)) => error.report(),
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn export_run(args: ExportArgs) -> Result<(), HuggingFaceError> {
    let options = ExportOptions {
        as_type: args.dtype,
        force: args.force,
        tokenizer: args.tokenizer,
    };
    let exported = export(&args.from, &args.out, &options)?;
    for skipped in exported.skipped {
        eprintln!("skipped {}: {}", skipped.path.display(), skipped.reason);
    }
    println!(
        "wrote step {} of {} to {} in {}",
        exported.step,
        exported.checkpoint.display(),
        args.out.display(),
        args.dtype
    );
    Ok(())
}

fn import_folder(args: &ImportArgs) -> Result<(), HuggingFaceError> {
    let imported = import(&args.from, &args.run, &args.settings)?;
    for note in imported.notes {
        eprintln!("note: {note}");
    }
    println!(
        "wrote {} parameters to {}; to train them further:\n  cargo xtask train --resume --out {}",
        imported.parameters,
        imported.checkpoint.display(),
        args.run.display()
    );
    Ok(())
}
