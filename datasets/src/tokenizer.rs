//! Texts to token ids: the built-in byte-level tokenizer, or any Hugging Face `tokenizer.json`.
//!
//! Raw text never yields a control token: the letters `<|endoftext|>` in a document are ordinary
//! text, and only the cache puts BOS, only a [`crate::Row`] has EOS.

mod hugging_face;
mod known_words;

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::hex;
use hugging_face::HuggingFace;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is not there or cannot be read.
    #[error("cannot read the tokenizer {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file is no Hugging Face tokenizer.
    #[error("{} is not a Hugging Face tokenizer.json: {reason}", path.display())]
    NotATokenizer {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// No token is known to begin or end a document.
    #[error("{} has no {role} token among {}; name its id in the settings", path.display(), tried.join(" "))]
    NoSpecialToken {
        /// The file.
        path: PathBuf,
        /// `BOS` or `EOS`.
        role: &'static str,
        /// The names that were looked for.
        tried: &'static [&'static str],
    },
    /// An id was given that the vocabulary does not have.
    #[error("{role} id {id} is outside the tokenizer's {vocab_size} ids")]
    SpecialIdOutOfRange {
        /// `BOS` or `EOS`.
        role: &'static str,
        /// The id.
        id: u32,
        /// Number of ids.
        vocab_size: usize,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed on the text that begins \"{start}\": {reason}")]
    Encode {
        /// The first letters of the text.
        start: String,
        /// What it said.
        reason: String,
    },
    /// The tokenizer failed on ids.
    #[error("the tokenizer cannot turn {count} ids into text: {reason}")]
    Decode {
        /// How many.
        count: usize,
        /// What it said.
        reason: String,
    },
    /// A text became ids no text may hold.
    #[error(
        "the tokenizer made id {id} ({problem}) of the text that begins \"{start}\"; use \
             another tokenizer or name other BOS and EOS ids"
    )]
    ForbiddenId {
        /// The id.
        id: u32,
        /// Why it is forbidden.
        problem: &'static str,
        /// The first letters of the text.
        start: String,
    },
}

/// BOS and EOS ids that override those found by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// The id every piece of a document begins with.
    pub bos: Option<u32>,
    /// The id that a document's last token predicts.
    pub eos: Option<u32>,
}

/// A tokenizer with its control tokens and its identity.
pub struct Tokenizer {
    kind: Kind,
    name: String,
    bos: u32,
    eos: u32,
    pad: u32,
    vocab_size: usize,
    sha256: String,
    /// The file, for whoever needs the tokenizer again.
    json: Option<Vec<u8>>,
}

enum Kind {
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

impl Tokenizer {
    /// One id per byte of UTF-8: 0..=255 are the bytes, 256 is BOS, 257 EOS, 258 the padding.
    #[must_use]
    pub fn byte_level() -> Self {
        Self {
            kind: Kind::Bytes,
            name: "byte-level".into(),
            bos: 256,
            eos: 257,
            pad: 258,
            vocab_size: 259,
            sha256: hex(&Sha256::digest(
                "byte-level: 256 bytes, BOS 256, EOS 257, padding 258",
            )),
            json: None,
        }
    }

    /// Reads a `tokenizer.json`. Its truncation, padding, post-processor and BPE dropout are
    /// switched off: they would drop, add or vary tokens. BOS and EOS are found by their usual
    /// names unless `special` names them; padding has EOS's id, which its labels never show.
    ///
    /// # Errors
    /// [`TokenizerError`], all but those about a text.
    pub fn from_file(path: &Path, special: SpecialIds) -> Result<Self, TokenizerError> {
        let bytes = std::fs::read(path).map_err(|source| TokenizerError::Io {
            path: path.to_owned(),
            source,
        })?;
        let model = HuggingFace::parse(path, &bytes)?;
        let vocab_size = model.vocab_size();
        let bos = model.special_id(path, "BOS", special.bos)?;
        let eos = model.special_id(path, "EOS", special.eos)?;
        for (role, id) in [("BOS", bos), ("EOS", eos)] {
            if id as usize >= vocab_size {
                return Err(TokenizerError::SpecialIdOutOfRange {
                    role,
                    id,
                    vocab_size,
                });
            }
        }
        Ok(Self {
            kind: Kind::HuggingFace(Box::new(model)),
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            bos,
            eos,
            pad: eos,
            vocab_size,
            sha256: hex(&Sha256::digest(&bytes)),
            json: Some(bytes),
        })
    }

    /// Encodes texts on all threads; the result does not depend on their number.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], and [`TokenizerError::ForbiddenId`] if a text became BOS, EOS
    /// or an id outside the vocabulary.
    pub fn encode_batch(
        &self,
        texts: &[impl AsRef<str> + Sync],
    ) -> Result<Vec<Vec<u32>>, TokenizerError> {
        texts
            .par_iter()
            .map(|text| self.encode(text.as_ref()))
            .collect()
    }

    /// Encodes one text, without BOS or EOS.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_batch`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let ids = match &self.kind {
            Kind::Bytes => text.bytes().map(u32::from).collect(),
            Kind::HuggingFace(model) => model.encode(text)?,
        };
        match self.forbidden(&ids) {
            None => Ok(ids),
            Some((id, problem)) => Err(TokenizerError::ForbiddenId {
                id,
                problem,
                start: start_of(text),
            }),
        }
    }

    /// The first id that no text may hold, and why.
    pub(crate) fn forbidden(&self, ids: &[u32]) -> Option<(u32, &'static str)> {
        ids.iter().find_map(|&id| {
            if id as usize >= self.vocab_size {
                Some((id, "outside its vocabulary"))
            } else if id == self.bos || id == self.eos {
                Some((id, "which marks a document's start or end"))
            } else {
                None
            }
        })
    }

    /// The text of these ids, control tokens included. What is no UTF-8, such as a part of a
    /// character, becomes the replacement character.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`].
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace(model) => model.decode(ids),
        }
    }

    pub(crate) fn named(self, name: &str) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    /// The bytes of its file, if it has one.
    pub(crate) fn json(&self) -> Option<&[u8]> {
        self.json.as_deref()
    }

    /// What the terminal calls it: the file's name, or `byte-level`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The id each piece of a document begins with.
    #[must_use]
    pub fn bos(&self) -> u32 {
        self.bos
    }

    /// The id a document's last token predicts; never an input.
    #[must_use]
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// The input at padded positions.
    #[must_use]
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// One more than the largest id, so what an embedding needs at least.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// SHA-256 of the file, in hexadecimal: the tokenizer's identity.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

/// Enough of a text to find it again.
fn start_of(text: &str) -> String {
    text.chars()
        .take(60)
        .collect::<String>()
        .escape_debug()
        .to_string()
}
