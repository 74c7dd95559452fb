//! Text from a checkpoint, token by token, through exact attention.

mod context;
mod sampler;
mod text;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use datasets::{Cache, CacheError, SpecialIds, Tokenizer, TokenizerError};
use tch::{Device, no_grad_guard};

use crate::commands::GenerateArgs;
use crate::device;
use crate::error::TrainError;
use crate::model::Model;
use crate::parts::set_threads;
use crate::saved::{Saved, SavedError};

pub use context::{Context, ContextError};
pub use sampler::{Sampler, Sampling};
pub use text::TextStream;

/// Why no text, or no more of it, could be made.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The checkpoint or its device.
    #[error(transparent)]
    Saved(#[from] SavedError),
    /// The tokenizer, or the prompt through it.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The tokenizer that lies in the run's token cache.
    #[error("the run's tokenizer is in its token cache; --tokenizer takes the file itself")]
    Cache(#[from] CacheError),
    /// A forward pass.
    #[error("the model failed after {tokens} tokens")]
    Model {
        /// Tokens written before.
        tokens: usize,
        /// Why.
        source: ContextError,
    },
    /// Weights that have run away.
    #[error(
        "the model's logits are not numbers: its training diverged. An earlier checkpoint may be sound"
    )]
    NotFinite,
    /// Nobody takes the text.
    #[error("cannot write the text")]
    Write(#[from] io::Error),
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The model ended the document.
    Document,
    /// All tokens that were asked for are there.
    Tokens,
}

/// What became of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Generated {
    /// Tokens written, without the one that ends a document.
    pub tokens: usize,
    /// Positions that the model read: the document's beginning, the prompt and the text.
    pub positions: usize,
    /// Why it ended.
    pub end: End,
    /// What it took, the prompt included.
    pub time: Duration,
}

/// A checkpoint that is ready to write.
pub struct Writer {
    /// The checkpoint and its settings.
    pub saved: Saved,
    /// The device in words.
    pub device_words: String,
    tokenizer: Tokenizer,
    model: Model,
    device: Device,
}

impl Writer {
    /// Loads the checkpoint that the command line names.
    ///
    /// # Errors
    /// [`GenerateError`].
    pub fn open(args: &GenerateArgs) -> Result<Self, GenerateError> {
        let saved = Saved::open(&args.saved.path, &args.changes())?;
        let tokenizer = tokenizer(&saved)?;
        saved.check_tokenizer(tokenizer.name(), tokenizer.sha256())?;
        let model = || -> Result<_, TrainError> {
            set_threads(saved.settings.threads)?;
            let (device, words) = device::choose(saved.settings.device)?;
            Ok((saved.model(tokenizer.vocab_size(), device)?, device, words))
        };
        let (model, device, device_words) = model().map_err(SavedError::from)?;
        Ok(Self {
            model,
            saved,
            device_words,
            tokenizer,
            device,
        })
    }

    /// Writes at most `tokens` tokens after `prompt` to `out`, each as soon as its characters are whole.
    ///
    /// # Errors
    /// [`GenerateError`]; what was written before stays.
    pub fn write(
        &self,
        prompt: &str,
        tokens: usize,
        sampling: &Sampling,
        out: &mut dyn Write,
    ) -> Result<Generated, GenerateError> {
        let start = Instant::now();
        let _no_grad = no_grad_guard();
        let prompt = self.tokenizer.encode(prompt)?;
        let mut text = TextStream::new(&self.tokenizer, &prompt)?;
        let mut sampler = Sampler::new(sampling, &self.never());
        let mask = self.saved.settings.kernel.mask();
        let mut context = Context::new(&self.model, self.device, mask);

        let mut next = [&[self.tokenizer.bos()], &prompt[..]].concat();
        let mut end = End::Tokens;
        let mut written = 0;
        while written < tokens {
            let logits = context.read(&next).map_err(|source| GenerateError::Model {
                tokens: written,
                source,
            })?;
            let id = sampler.choose(&logits).ok_or(GenerateError::NotFinite)?;
            if id == self.tokenizer.eos() {
                end = End::Document;
                break;
            }
            written += 1;
            out.write_all(text.push(id)?.as_bytes())?;
            out.flush()?;
            next = vec![id];
        }
        out.write_all(text.rest()?.as_bytes())?;
        out.flush()?;
        Ok(Generated {
            tokens: written,
            positions: 1 + prompt.len() + written,
            end,
            time: start.elapsed(),
        })
    }

    /// Ids that no document holds: what begins one, and the padding, unless that is what ends one.
    fn never(&self) -> Vec<u32> {
        let mut ids = vec![self.tokenizer.bos(), self.tokenizer.pad()];
        ids.retain(|&id| id != self.tokenizer.eos());
        ids
    }
}

/// The run's tokenizer: bytes, the file of the settings, or the one in the token cache that it trained on.
fn tokenizer(saved: &Saved) -> Result<Tokenizer, GenerateError> {
    let identity = &saved.state.data_identity;
    let settings = &saved.settings;
    if let Some(path) = &settings.tokenizer {
        let tokenizer = Tokenizer::from_file(path, SpecialIds::default())?;
        // Before its ids mean anything.
        saved.check_tokenizer(tokenizer.name(), tokenizer.sha256())?;
        if (tokenizer.bos(), tokenizer.eos()) == (identity.bos, identity.eos) {
            return Ok(tokenizer);
        }
        // The token cache of the run was made with ids of its own choice.
        let special = SpecialIds {
            bos: Some(identity.bos),
            eos: Some(identity.eos),
        };
        return Ok(Tokenizer::from_file(path, special)?);
    }
    let bytes = Tokenizer::byte_level();
    match &settings.data {
        Some(data) if bytes.sha256() != identity.tokenizer => Ok(Cache::open(data)?.tokenizer()?),
        _ => Ok(bytes),
    }
}
