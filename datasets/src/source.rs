//! Where documents come from: Parquet, JSON lines and `.bin` files; named one by one, as folders,
//! by a pattern, or on the hub.

mod bin;
pub mod hub;
mod json_lines;
pub mod parquet;
mod selection;

use std::path::{Path, PathBuf};

pub use hub::{Hub, HubError, HubFile};
pub use parquet::{ParquetError, ParquetReader, Record};
pub use selection::{Columns, Filters, Selection};

use crate::bin_file::BinError;
use bin::BinReader;
use json_lines::JsonLines;

/// Why a source cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The path does not exist or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A folder without any file of documents.
    #[error("no .parquet, .jsonl or .bin file in the folder {} (hidden files and subfolders are \
             not looked at); name a file, a pattern or the folder that holds the files", path.display())]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
    },
    /// No file has such a name.
    #[error("no file matches {pattern}")]
    NoMatch {
        /// The pattern.
        pattern: String,
    },
    /// The pattern means nothing.
    #[error("{pattern} is no pattern of file names: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A Parquet file.
    #[error(transparent)]
    Parquet(#[from] ParquetError),
    /// A `.bin` file.
    #[error(transparent)]
    Bin(#[from] BinError),
    /// A `.bin` file of another tokenizer.
    #[error("{} does not hold tokens of the tokenizer {tokenizer}: {reason}; give the tokenizer \
             that made it", path.display())]
    BinTokenizer {
        /// The file.
        path: PathBuf,
        /// The tokenizer's name.
        tokenizer: String,
        /// What shows it.
        reason: String,
    },
    /// A line is not as it should be, or cannot be decompressed.
    #[error("{}, line {line}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What is wrong.
        reason: String,
    },
    /// A file on the hub.
    #[error(transparent)]
    Hub(#[from] HubError),
}

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Parquet.
    Parquet,
    /// A JSON object a line, plain or compressed with gzip or zstd.
    JsonLines,
    /// Token ids.
    Bin,
}

impl Kind {
    /// By the file's name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let plain = name
            .strip_suffix(".gz")
            .or_else(|| name.strip_suffix(".zst"))
            .unwrap_or(&name);
        match plain.rsplit_once('.')?.1 {
            "parquet" if plain == name => Some(Self::Parquet),
            "bin" if plain == name => Some(Self::Bin),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            // A plain `.json` is as often a description of the data.
            "json" if plain != name => Some(Self::JsonLines),
            _ => None,
        }
    }
}

/// A file of documents.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceFile {
    /// How it holds them.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
}

/// Where a file is.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// On this machine.
    Local(PathBuf),
    /// On the hub, and perhaps in its cache.
    Hub(HubFile),
}

impl SourceFile {
    fn local(path: PathBuf) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let kind = match Kind::of(&name) {
            Some(kind) => kind,
            None if name.ends_with(".json") => Kind::JsonLines,
            // Says itself what it is instead, if it is something else.
            None => Kind::Parquet,
        };
        Self {
            kind,
            place: Place::Local(path),
        }
    }

    /// Its path or its name on the hub.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.place {
            Place::Local(path) => path.display().to_string(),
            Place::Hub(file) => file.to_string(),
        }
    }

    /// Where its bytes are; fetches them if need be.
    pub(crate) fn fetch(&self, hub: &Hub) -> Result<PathBuf, HubError> {
        match &self.place {
            Place::Local(path) => Ok(path.clone()),
            Place::Hub(file) => hub.fetch(file),
        }
    }

    /// Whether `next` may go on with this one's last document.
    fn may_continue_in(&self, next: &Self) -> bool {
        let folder = |of: &Self| match &of.place {
            Place::Local(path) => path.parent().map(|folder| folder.display().to_string()),
            Place::Hub(file) => Some(file.folder()),
        };
        self.kind == Kind::Bin && next.kind == Kind::Bin && folder(self) == folder(next)
    }
}

/// Expands files, folders, patterns such as `data/*.parquet` and hub names such as
/// `hf://HuggingFaceFW/fineweb-edu/sample/10BT` to files, sorted by name and each named once, so
/// that the order does not depend on the file system. Of a folder, the files directly in it count
/// whose names [`Kind::of`] knows and that do not begin with `.` or `_`: writers leave temporary
/// and bookkeeping files so named.
///
/// # Errors
/// [`SourceError`] if there is nothing of the name.
pub fn list(sources: &[PathBuf], hub: &Hub) -> Result<Vec<SourceFile>, SourceError> {
    let (mut paths, mut on_hub) = (Vec::new(), Vec::new());
    for source in sources {
        match source.to_str() {
            Some(name) if name.starts_with(hub::SCHEME) => on_hub.extend(hub.list(name)?),
            Some(pattern) if !source.exists() && pattern.contains(['*', '?', '[']) => {
                paths.extend(matching(pattern)?);
            }
            _ => paths.extend(expand(source)?),
        }
    }
    paths.sort();
    paths.dedup();
    on_hub.sort_by_key(HubFile::to_string);
    on_hub.dedup();
    let local = paths.into_iter().map(SourceFile::local);
    let on_hub = on_hub.into_iter().map(|file| SourceFile {
        kind: Kind::of(&file.path).unwrap_or(Kind::Parquet),
        place: Place::Hub(file),
    });
    Ok(local.chain(on_hub).collect())
}

fn matching(pattern: &str) -> Result<Vec<PathBuf>, SourceError> {
    let found = glob::glob(pattern).map_err(|error| SourceError::Pattern {
        pattern: pattern.into(),
        reason: error.to_string(),
    })?;
    let mut paths = Vec::new();
    for path in found {
        let path = path.map_err(|error| SourceError::Io {
            path: error.path().into(),
            source: error.into(),
        })?;
        if path.is_file() {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(SourceError::NoMatch {
            pattern: pattern.into(),
        });
    }
    Ok(paths)
}

/// The file itself, or the files of the folder.
fn expand(path: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let io = |source| SourceError::Io {
        path: path.to_owned(),
        source,
    };
    if !std::fs::metadata(path).map_err(io)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let file = entry.map_err(io)?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if is_listed(&name) && file.is_file() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(SourceError::EmptyFolder {
            path: path.to_owned(),
        });
    }
    Ok(files)
}

/// Whether a file of this name counts where it was not named itself.
fn is_listed(name: &str) -> bool {
    !name.starts_with(['.', '_']) && Kind::of(name).is_some()
}

/// What a record holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content {
    /// Perhaps an empty one.
    Document(Document),
    /// No text.
    Null,
    /// Something that a filter leaves out.
    Filtered,
}

/// A document as its source has it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Document {
    Text(String),
    /// Ids, without BOS.
    Tokens(Vec<u32>),
}

impl Document {
    /// Bytes in memory, so 0 for an empty one.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(ids) => size_of_val(ids.as_slice()),
        }
    }
}

/// What a `.bin` file is compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vocabulary<'a> {
    pub(crate) tokenizer: &'a str,
    pub(crate) size: usize,
    pub(crate) bos: u32,
}

/// The records of one file, in order.
pub(crate) enum Reader {
    Parquet(Box<ParquetReader>),
    JsonLines(JsonLines),
    Bin(BinReader),
}

impl Reader {
    /// Opens file `number` of `files`, already fetched to `path`, behind its first `skip` records.
    pub(crate) fn open(
        files: &[SourceFile],
        number: usize,
        path: &Path,
        skip: u64,
        selection: &Selection,
        vocabulary: Vocabulary<'_>,
        hub: &Hub,
    ) -> Result<Self, SourceError> {
        let (before, here) = files.split_at(number);
        Ok(match here[0].kind {
            Kind::Parquet => {
                Self::Parquet(Box::new(ParquetReader::open_at(path, selection, skip)?))
            }
            Kind::JsonLines => Self::JsonLines(JsonLines::open(path, selection, skip)?),
            Kind::Bin => {
                let is_continued = |pair: &[SourceFile]| pair[0].may_continue_in(&pair[1]);
                let followers: Result<Vec<PathBuf>, HubError> = here
                    .windows(2)
                    .take_while(|pair| is_continued(pair))
                    .map(|pair| pair[1].fetch(hub))
                    .collect();
                let continues = before
                    .last()
                    .is_some_and(|last| last.may_continue_in(&here[0]));
                Self::Bin(BinReader::open(
                    path, followers?, continues, skip, vocabulary,
                )?)
            }
        })
    }

    pub(crate) fn next(&mut self) -> Option<Result<Content, SourceError>> {
        match self {
            Self::Parquet(reader) => Some(reader.next()?.map_err(SourceError::from).map(
                |record| match record {
                    Record { filtered: true, .. } => Content::Filtered,
                    Record {
                        text: Some(text), ..
                    } => Content::Document(Document::Text(text)),
                    Record { .. } => Content::Null,
                },
            )),
            Self::JsonLines(reader) => reader.next().transpose(),
            Self::Bin(reader) => reader.next().transpose(),
        }
    }

    /// How much of the file is read, of 1.
    pub(crate) fn share(&self) -> f64 {
        match self {
            Self::Parquet(reader) => reader.share(),
            Self::JsonLines(reader) => reader.share(),
            Self::Bin(reader) => reader.share(),
        }
    }
}
