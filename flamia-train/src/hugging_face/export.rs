//! From a checkpoint to a folder that transformers loads.

use std::fs::{self, File, Permissions};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::source::Source;
use super::tensors::Weights;
use super::{CONFIG, ExportType, HuggingFaceError, LlamaConfig, TOKENIZER, WEIGHTS, io};
use crate::atomic::atomic_write;
use crate::checkpoint::Skipped;
use crate::error::TrainError;
use crate::parts::shape;

/// The embedding, whose rows are the vocabulary.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// How to export.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// The weights' type.
    pub as_type: ExportType,
    /// Whether to replace a model's folder that is there.
    pub force: bool,
    /// The run's tokenizer, where it is no longer where the run had it.
    pub tokenizer: Option<PathBuf>,
}

/// What was exported.
#[derive(Debug)]
pub struct Exported {
    /// The checkpoint.
    pub checkpoint: PathBuf,
    /// Its step.
    pub step: u64,
    /// Newer checkpoints that are damaged, and were passed over.
    pub skipped: Vec<Skipped>,
    /// The model that it holds.
    pub config: LlamaConfig,
}

/// Writes the newest whole checkpoint of the run `from`, or the checkpoint `from`, to the folder `out`:
/// weights, configuration and tokenizer. The folder is there when it is whole, and not before.
///
/// # Errors
/// [`HuggingFaceError`]; then `out` is as it was.
pub fn export(
    from: &Path,
    out: &Path,
    options: &ExportOptions,
) -> Result<Exported, HuggingFaceError> {
    check_place(out, options.force)?;
    let source = Source::find(from)?;
    let path = source.checkpoint.join(WEIGHTS);
    let weights = Weights::read(&path)?;
    // An embedding that is missing is told with all else that is.
    let vocab = weights.rows(EMBEDDING)?.unwrap_or_default();
    let config = LlamaConfig {
        shape: shape(&source.settings, vocab),
        // Positions restart in every document, and none of them is longer than a row.
        max_positions: source.settings.batch.row_tokens,
        bos: Some(source.state.data_identity.bos),
        eos: vec![source.state.data_identity.eos],
    };
    let tokenizer = source.tokenizer(options.tokenizer.as_deref())?;

    let place = place_of(out);
    fs::create_dir_all(place).map_err(io("create", place))?;
    let draft = unfinished(place)?;
    weights.write(&config.shape, options.as_type, &draft.path().join(WEIGHTS))?;
    let write = |name: &str, bytes: &[u8]| {
        atomic_write(&draft.path().join(name), bytes).map_err(TrainError::from)
    };
    let json = |value: Value| format!("{value:#}\n").into_bytes();
    write(CONFIG, &json(config.to_json(options.as_type.torch())))?;
    // safetensors makes a private file; the others are as the user makes files.
    let (weights, readable) = (draft.path().join(WEIGHTS), draft.path().join(CONFIG));
    fs::metadata(readable)
        .and_then(|file| fs::set_permissions(&weights, file.permissions()))
        .map_err(io("set the permissions of", &weights))?;
    write("generation_config.json", &json(config.generation_json()))?;
    write(TOKENIZER, &tokenizer.json)?;
    write(
        "tokenizer_config.json",
        &json(tokenizer.config(config.max_positions)),
    )?;
    write("README.md", readme(&source, options.as_type).as_bytes())?;
    put_in_place(draft, out)?;
    Ok(Exported {
        checkpoint: source.checkpoint,
        step: source.state.step,
        skipped: source.skipped,
        config,
    })
}

/// Refuses what must not be replaced.
fn check_place(out: &Path, force: bool) -> Result<(), HuggingFaceError> {
    let path = out.to_path_buf();
    match (out.exists(), force) {
        (false, _) => Ok(()),
        (true, false) => Err(HuggingFaceError::Exists { path }),
        (true, true) if out.join(CONFIG).exists() => Ok(()),
        (true, true) => Err(HuggingFaceError::NotReplaced { path }),
    }
}

/// The folder in which `out` is a name.
fn place_of(out: &Path) -> &Path {
    match out.parent() {
        Some(place) if !place.as_os_str().is_empty() => place,
        _ => Path::new("."),
    }
}

/// A hidden folder beside the place of the export, removed unless it gets there.
fn unfinished(place: &Path) -> Result<tempfile::TempDir, HuggingFaceError> {
    let mut folder = tempfile::Builder::new();
    folder.prefix(".unfinished-export-");
    // Temporary folders are private; an export is as readable as any folder that the user makes.
    #[cfg(unix)]
    folder.permissions(<Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o777));
    folder
        .tempdir_in(place)
        .map_err(io("create a folder in", place))
}

/// Renames the finished folder to `out`; one that is there is put aside first, and removed last.
fn put_in_place(draft: tempfile::TempDir, out: &Path) -> Result<(), HuggingFaceError> {
    let place = place_of(out);
    let replaced = match out.exists() {
        true => {
            let aside = unfinished(place)?;
            fs::rename(out, aside.path().join("replaced")).map_err(io("rename", out))?;
            Some(aside)
        }
        false => None,
    };
    if let Err(error) = fs::rename(draft.path(), out) {
        if let Some(aside) = &replaced {
            fs::rename(aside.path().join("replaced"), out).map_err(io("put back", out))?;
        }
        return Err(io("create", out)(error));
    }
    // It has another name now.
    let _ = draft.keep();
    if cfg!(unix) {
        File::open(place)
            .and_then(|folder| folder.sync_all())
            .map_err(io("sync", place))?;
    }
    replaced
        .map_or(Ok(()), tempfile::TempDir::close)
        .map_err(io("remove the replaced", out))
}

fn readme(source: &Source, as_type: ExportType) -> String {
    let state = &source.state;
    let loss = state.validation.last.map_or(String::new(), |last| {
        format!(
            "Validation loss after step {}: {:.4} (nats, in the run's unit).\n",
            last.step, last.loss
        )
    });
    format!(
        "A Llama trained by FLAMIA {version}: step {step}, {tokens} tokens, attention {attention}, weights in \
         {as_type}.\n{loss}\n\
         ```python\n\
         from transformers import AutoModelForCausalLM, AutoTokenizer\n\
         model = AutoModelForCausalLM.from_pretrained(\".\", dtype=\"auto\")\n\
         tokenizer = AutoTokenizer.from_pretrained(\".\")\n\
         ```\n\n\
         Every document began with the BOS token in training, and ended with EOS. `cargo xtask import` makes a \
         run of this folder.\n",
        version = state.versions.flamia,
        step = state.step,
        tokens = state.tokens,
        attention = source.settings.attention,
    )
}
