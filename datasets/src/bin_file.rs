//! The `.bin` files of token ids that llm.c and modded-nanogpt read and write.
//!
//! 256 little-endian 32-bit words of header (magic, version, number of ids, zeros), then the ids:
//! `u16` under GPT-2's magic, `u32` under Llama 3's. The token that separates documents stands
//! *before* each of them. A document may go on in the next file.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Why a file cannot be read as `.bin`.
#[derive(Debug, thiserror::Error)]
pub enum BinError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file begins with something else.
    #[error("{} is no .bin file of tokens: {reason}", path.display())]
    NotBin {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// The file is shorter or longer than its header says.
    #[error("{} should have {expected} bytes for the {tokens} tokens in its header, but has \
             {found}; it is {}: copy or write it again", path.display(),
            if found < expected { "truncated" } else { "overlong" })]
    Size {
        /// The file.
        path: PathBuf,
        /// Ids by the header.
        tokens: u64,
        /// Bytes that the header asks for.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
}

/// How ids are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Width {
    /// `u16`, under GPT-2's magic: vocabularies up to 65,536.
    #[serde(rename = "uint16")]
    U16,
    /// `u32`, under Llama 3's magic.
    #[serde(rename = "uint32")]
    U32,
}

impl Width {
    /// The narrower one in which no id of the vocabulary wraps.
    #[must_use]
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 {
            Self::U16
        } else {
            Self::U32
        }
    }

    /// Bytes of an id.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }

    fn magic_and_version(self) -> (i32, i32) {
        match self {
            Self::U16 => (20_240_520, 1),
            Self::U32 => (20_240_801, 7),
        }
    }
}

/// What a `.bin` file says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// How the ids are stored.
    pub width: Width,
    /// How many there are; under 2^31.
    pub tokens: u64,
}

impl Header {
    /// Bytes before the first id.
    pub const BYTES: usize = 1024;

    /// The header's words.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let (magic, version) = self.width.magic_and_version();
        let mut bytes = [0; Self::BYTES];
        for (word, value) in [magic, version, self.tokens as i32].into_iter().enumerate() {
            bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Bytes of a whole file.
    #[must_use]
    pub fn file_bytes(self) -> u64 {
        Self::BYTES as u64 + self.tokens * self.width.bytes() as u64
    }

    /// Reads a file's header, leaves the file at its first id, and compares the file's size.
    ///
    /// # Errors
    /// [`BinError`].
    pub fn read(file: &mut File, path: &Path) -> Result<Self, BinError> {
        let io = |source| BinError::Io {
            path: path.into(),
            source,
        };
        let not_bin = |reason| BinError::NotBin {
            path: path.into(),
            reason,
        };
        let found = file.metadata().map_err(io)?.len();
        let mut bytes = [0; Self::BYTES];
        if found < Self::BYTES as u64 {
            return Err(not_bin(format!(
                "{found} bytes do not hold its {}-byte header",
                Self::BYTES
            )));
        }
        file.read_exact(&mut bytes).map_err(io)?;
        let [magic, version, tokens] = [0, 4, 8]
            .map(|at| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        let width = [Width::U16, Width::U32]
            .into_iter()
            .find(|width| width.magic_and_version().0 == magic)
            .ok_or_else(|| {
                not_bin(format!(
                    "its first word is {magic}, not 20240520 (GPT-2) or 20240801 (Llama 3)"
                ))
            })?;
        if ![1, 7].contains(&version) {
            return Err(not_bin(format!("its version is {version}, not 1 or 7")));
        }
        let tokens = u64::try_from(tokens)
            .map_err(|_| not_bin(format!("it claims to hold {tokens} tokens")))?;
        let header = Self { width, tokens };
        let expected = header.file_bytes();
        if found != expected {
            return Err(BinError::Size {
                path: path.into(),
                tokens,
                expected,
                found,
            });
        }
        Ok(header)
    }
}

/// Little-endian ids of either width, as they stand in a file.
#[derive(Clone, Copy)]
pub(crate) enum Ids<'a> {
    U16(&'a [[u8; 2]]),
    U32(&'a [[u8; 4]]),
}

impl<'a> Ids<'a> {
    pub(crate) fn new(bytes: &'a [u8], width: Width) -> Self {
        match width {
            Width::U16 => Self::U16(bytes.as_chunks().0),
            Width::U32 => Self::U32(bytes.as_chunks().0),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::U16(ids) => ids.len(),
            Self::U32(ids) => ids.len(),
        }
    }

    pub(crate) fn slice(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::U16(ids) => Self::U16(&ids[range]),
            Self::U32(ids) => Self::U32(&ids[range]),
        }
    }

    pub(crate) fn extend(self, to: &mut Vec<i64>) {
        match self {
            Self::U16(ids) => to.extend(ids.iter().map(|&id| i64::from(u16::from_le_bytes(id)))),
            Self::U32(ids) => to.extend(ids.iter().map(|&id| i64::from(u32::from_le_bytes(id)))),
        }
    }
}
