//! From a Hugging Face folder to a run that has not taken a step yet.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::tensors::load;
use super::{CONFIG, HuggingFaceError, LlamaConfig, TOKENIZER, byte_tokenizer, io, read_json};
use crate::atomic::atomic_write;
use crate::checkpoint::Checkpoints;
use crate::error::TrainError;
use crate::model::ModelShape;
use crate::parts::Parts;
use crate::run_folder::{RunFolder, RunFolderError, SETTINGS};
use crate::settings::Settings;
use crate::setup::{fresh_state, saved_form};

/// What was imported.
#[derive(Debug)]
pub struct Imported {
    /// The run's first checkpoint.
    pub checkpoint: PathBuf,
    /// Weights.
    pub parameters: usize,
    /// What the user should know besides.
    pub notes: Vec<String>,
}

/// Makes `run` a run that begins with the weights of the Hugging Face folder `from`: a checkpoint of step
/// 0, with fresh moments. `args` are the flags of `cargo xtask train` for it, as they cannot be changed when
/// it goes on; those about the model come from the folder's `config.json`.
///
/// # Errors
/// [`HuggingFaceError`]; nothing is written before the folder is known to fit.
pub fn import(from: &Path, run: &Path, args: &[OsString]) -> Result<Imported, HuggingFaceError> {
    if run.join(SETTINGS).exists() {
        return Err(RunFolderError::Occupied { path: run.into() }.into());
    }
    let config_path = from.join(CONFIG);
    let config = LlamaConfig::read(&config_path)?;
    let tokenizer = from.join(TOKENIZER);
    let own_tokenizer = tokenizer.exists() && read_json(&tokenizer)? != byte_tokenizer();
    let mut fixed = model_flags(&config.shape);
    if own_tokenizer {
        fixed.extend(["--tokenizer".into(), tokenizer.clone().into()]);
    }
    refuse_fixed(args, &fixed)?;
    fixed.extend_from_slice(args);
    let mut settings = Settings::load(fixed)?;

    let parts = Parts::new(&settings)?;
    let ours = parts.dataset.tokenizer();
    if ours.vocab_size() != config.shape.vocab {
        return Err(HuggingFaceError::Vocabulary {
            path: config_path,
            found: config.shape.vocab,
            tokenizer: ours.name().into(),
            expected: ours.vocab_size(),
        });
    }
    let mut notes = Vec::new();
    for (role, ours, theirs) in [
        ("bos", ours.bos(), config.bos.as_slice()),
        ("eos", ours.eos(), &config.eos[..]),
    ] {
        if !theirs.contains(&ours) {
            notes.push(format!(
                "{role}_token_id is {theirs:?} in {}, and training takes {ours} of the tokenizer's",
                config_path.display()
            ));
        }
    }
    let row = settings.batch.row_tokens;
    if row > config.max_positions {
        notes.push(format!(
            "rows of {row} tokens are longer than the {} positions that the model was trained for",
            config.max_positions
        ));
    }
    let (model, optimizer) = parts.model(&settings)?;
    load(from, &model.shape, &model.params)?;

    let folder = RunFolder::create(run)?;
    settings.out = Some(run.into());
    if own_tokenizer {
        // A copy, so that the run needs the folder no longer.
        let copy = run.join(TOKENIZER);
        let bytes = std::fs::read(&tokenizer).map_err(io("read", &tokenizer))?;
        atomic_write(&copy, &bytes).map_err(TrainError::from)?;
        settings.tokenizer = Some(copy);
    }
    let table = saved_form(&settings)?;
    let state = fresh_state(
        &settings,
        &table,
        &parts.dataset,
        parts.device,
        parts.threads,
    );
    let checkpoints = Checkpoints::open(run, settings.checkpoint.keep)?;
    let checkpoint = checkpoints.save(&state, &model.params, &optimizer)?;
    // Last: it makes the folder a run.
    atomic_write(&folder.settings(), table.to_string().as_bytes()).map_err(TrainError::from)?;
    Ok(Imported {
        checkpoint,
        parameters: model.params.count(),
        notes,
    })
}

/// The flags that describe a model of this shape.
fn model_flags(shape: &ModelShape) -> Vec<OsString> {
    let flags = [
        ("--model-dim", shape.dim.to_string()),
        ("--model-layers", shape.layers.to_string()),
        ("--model-heads", shape.heads.to_string()),
        ("--model-kv-heads", shape.kv_heads.to_string()),
        ("--model-head-dim", shape.head_dim.to_string()),
        ("--model-ffn-dim", shape.ffn_dim.to_string()),
        ("--model-tied", shape.tied.to_string()),
        ("--model-rope-theta", shape.rope_theta.to_string()),
        ("--model-norm-eps", shape.norm_eps.to_string()),
    ];
    let words = flags.into_iter();
    words
        .flat_map(|(flag, value)| [flag.into(), value.into()])
        .collect()
}

/// Refuses flags in `args` that are among the `fixed` ones or do not fit an import.
fn refuse_fixed(args: &[OsString], fixed: &[OsString]) -> Result<(), HuggingFaceError> {
    for arg in args {
        let flag = arg.to_string_lossy();
        let flag = flag.split('=').next().unwrap_or_default();
        let why = match flag {
            "--out" => "the run's folder is the second argument",
            "--resume" => "an imported run is a new one; `cargo xtask train --resume` continues it",
            _ if flag.starts_with("--") && fixed.iter().any(|fixed| fixed == flag) => {
                "the imported folder decides it"
            }
            _ => continue,
        };
        return Err(HuggingFaceError::Fixed {
            flag: flag.into(),
            why,
        });
    }
    Ok(())
}
