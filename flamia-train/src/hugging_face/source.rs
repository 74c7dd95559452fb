//! What is exported: a checkpoint, the settings of its run, and the tokenizer it was trained with.

use std::fs;
use std::path::{Path, PathBuf};

use datasets::{SpecialIds, Tokenizer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::byte_tokenizer::CONTROL;
use super::{HuggingFaceError, TOKENIZER, byte_tokenizer, io};
use crate::checkpoint::{Checkpoints, Skipped, TrainState, hex};
use crate::data::DataError;
use crate::found::{Found, NotFound, find};
use crate::run_folder::SETTINGS;
use crate::settings::Settings;

/// A whole checkpoint and what belongs to it.
pub(super) struct Source {
    pub(super) run: PathBuf,
    pub(super) checkpoint: PathBuf,
    /// Newer checkpoints that are damaged.
    pub(super) skipped: Vec<Skipped>,
    pub(super) settings: Settings,
    pub(super) state: TrainState,
}

impl Source {
    /// The newest whole checkpoint of the run `path`, or the checkpoint `path`. The run may be going on.
    pub(super) fn find(path: &Path) -> Result<Self, HuggingFaceError> {
        let found = find(path).map_err(|none| match none {
            NotFound::Run => HuggingFaceError::NoRun { path: path.into() },
            NotFound::Checkpoint => HuggingFaceError::NoCheckpoint { run: path.into() },
            NotFound::Unsound(error) => error.into(),
        })?;
        let Found {
            run,
            checkpoint,
            skipped,
        } = found;
        Ok(Self {
            settings: Settings::load_resuming(&run.join(SETTINGS), [], [])?,
            state: Checkpoints::read_state(&checkpoint)?,
            run,
            checkpoint,
            skipped,
        })
    }

    /// The tokenizer, from the file `given` or else from where the run had it.
    pub(super) fn tokenizer(
        &self,
        given: Option<&Path>,
    ) -> Result<ExportedTokenizer, HuggingFaceError> {
        let identity = &self.state.data_identity;
        let (bos, eos) = (identity.bos, identity.eos);
        if identity.tokenizer == Tokenizer::byte_level().sha256() {
            return Ok(ExportedTokenizer {
                json: byte_tokenizer().to_string().into_bytes(),
                bos: CONTROL[0].into(),
                eos: CONTROL[1].into(),
                pad: CONTROL[2].into(),
            });
        }
        let of_the_run = || {
            let data = self.settings.data.as_ref().map(|data| data.join(TOKENIZER));
            let copy = Some(self.run.join(TOKENIZER));
            [self.settings.tokenizer.clone(), copy, data]
        };
        let candidates: Vec<PathBuf> = match given {
            Some(given) => vec![given.into()],
            None => of_the_run().into_iter().flatten().collect(),
        };
        let mut found = None;
        for path in candidates {
            if given.is_none() && !path.exists() {
                continue;
            }
            let json = fs::read(&path).map_err(io("read", &path))?;
            if hex(&Sha256::digest(&json)) == identity.tokenizer {
                let special = SpecialIds {
                    bos: Some(bos),
                    eos: Some(eos),
                };
                let tokenizer = Tokenizer::from_file(&path, special).map_err(DataError::from)?;
                let spelled = |id| tokenizer.decode(&[id]).map_err(DataError::from);
                return Ok(ExportedTokenizer {
                    json,
                    bos: spelled(bos)?,
                    eos: spelled(eos)?,
                    pad: spelled(tokenizer.pad())?,
                });
            }
            found.get_or_insert(path);
        }
        Err(HuggingFaceError::Tokenizer {
            expected: identity.tokenizer.clone(),
            found,
        })
    }
}

/// A tokenizer as a folder holds it.
pub(super) struct ExportedTokenizer {
    /// `tokenizer.json`.
    pub(super) json: Vec<u8>,
    bos: String,
    eos: String,
    pad: String,
}

impl ExportedTokenizer {
    /// `tokenizer_config.json`: which tokens are the control tokens, and that the file is to be taken as
    /// it is.
    pub(super) fn config(&self, max_positions: usize) -> Value {
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos,
            "eos_token": self.eos,
            "pad_token": self.pad,
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": false,
        })
    }
}
