//! Models to and from Hugging Face's Llama folders.
//!
//! Weights need no conversion but that of their type: checkpoints have Hugging Face's names and
//! shapes, and rotary embeddings pair the same halves. What a folder tells in `config.json` and this
//! trainer's model does not have is refused by name, for it would compute something else.

mod byte_tokenizer;
mod config;
mod export;
mod import;
mod source;
mod tensors;

use std::fmt;
use std::path::{Path, PathBuf};

pub use byte_tokenizer::byte_tokenizer;
pub use config::LlamaConfig;
pub use export::{ExportOptions, Exported, export};
pub use import::{Imported, import};
pub use tensors::ExportType;

use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::error::TrainError;
use crate::model::ShapeError;
use crate::run_folder::RunFolderError;
use crate::settings::SettingsError;

/// The weights of a folder whose weights are in one file.
const WEIGHTS: &str = "model.safetensors";
/// Which file has which tensor, where they are in several.
const INDEX: &str = "model.safetensors.index.json";
/// What the model is built like.
const CONFIG: &str = "config.json";
/// The tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// Why a model cannot be exported or imported.
#[derive(Debug, thiserror::Error)]
pub enum HuggingFaceError {
    /// The file system.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file that is not JSON.
    #[error("{} is not JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A safetensors file that cannot be written.
    #[error("cannot write the tensors of {}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The library's reason.
        source: safetensors::SafeTensorError,
    },
    /// An entry of a JSON file that is missing or of another kind.
    #[error("{} has {key} = {found}, expected {expected}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// What it has to be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// A model with something that this trainer's does not have.
    #[error(
        "{} describes a model that this trainer does not have:{}",
        path.display(), unsupported.iter().map(|one| format!("\n  {one}")).collect::<String>()
    )]
    Unsupported {
        /// The `config.json`.
        path: PathBuf,
        /// All that is not supported.
        unsupported: Vec<Unsupported>,
    },
    /// There is neither a run nor a checkpoint.
    #[error(
        "{} is neither a run (it has no settings.toml) nor a checkpoint of one (it has no \
         MANIFEST.json): give a folder such as runs/a, or runs/a/checkpoints/step-000100",
        path.display()
    )]
    NoRun {
        /// What was given.
        path: PathBuf,
    },
    /// A run that has saved nothing yet.
    #[error("{} has no checkpoint yet: train until it saves one", run.display())]
    NoCheckpoint {
        /// The run's folder.
        run: PathBuf,
    },
    /// The folder to be written is there.
    #[error("{} exists already: give another folder, or --force to replace it", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder to be replaced does not look like a model's.
    #[error(
        "{} is no model's folder (it has no {CONFIG}), so --force does not replace it: give another \
         folder, or remove this one",
        path.display()
    )]
    NotReplaced {
        /// The folder.
        path: PathBuf,
    },
    /// The run's tokenizer is not where the run found it.
    #[error(
        "the run's tokenizer (SHA-256 {expected}) is not {}: give its tokenizer.json as --tokenizer",
        found.as_deref().map_or("found".into(), |path| path.display().to_string())
    )]
    Tokenizer {
        /// The hash in the run's checkpoint.
        expected: String,
        /// The file that is there instead.
        found: Option<PathBuf>,
    },
    /// A model whose vocabulary is not the tokenizer's.
    #[error(
        "{} has vocab_size = {found}, but the tokenizer {tokenizer} has {expected} ids: a model is \
         trained with as many embeddings as its tokenizer has ids. The tokenizer is the folder's \
         {TOKENIZER}, else the one given as --tokenizer, else that of --data, else bytes",
        path.display()
    )]
    Vocabulary {
        /// The `config.json`.
        path: PathBuf,
        /// Its vocabulary.
        found: usize,
        /// The tokenizer's name.
        tokenizer: String,
        /// Its ids.
        expected: usize,
    },
    /// A setting that is not the user's to choose here.
    #[error("{flag} cannot be given: {why}")]
    Fixed {
        /// The flag.
        flag: String,
        /// What decides it.
        why: &'static str,
    },
    /// A checkpoint, or tensors that do not fit the model.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The settings of the run, or those given for it.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The run's folder.
    #[error(transparent)]
    RunFolder(#[from] RunFolderError),
    /// The sizes of the model.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The tokenizer or the data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Setting the run up.
    #[error(transparent)]
    Train(Box<TrainError>),
}

impl From<TrainError> for HuggingFaceError {
    fn from(error: TrainError) -> Self {
        match error {
            // Help and usage have a form of their own.
            TrainError::Settings(error) => Self::Settings(error),
            error => Self::Train(Box::new(error)),
        }
    }
}

/// Something in a `config.json` that this trainer's model does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// The entry.
    pub key: String,
    /// What it is.
    pub found: String,
    /// What it has to be, and why.
    pub supported: &'static str,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            found,
            supported,
        } = self;
        write!(f, "{key} is {found}; supported: {supported}")
    }
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> HuggingFaceError {
    let path = path.to_path_buf();
    move |source| HuggingFaceError::Io {
        action,
        path,
        source,
    }
}

fn read_json(path: &Path) -> Result<serde_json::Value, HuggingFaceError> {
    let bytes = std::fs::read(path).map_err(io("read", path))?;
    serde_json::from_slice(&bytes).map_err(|source| HuggingFaceError::Json {
        path: path.into(),
        source,
    })
}
