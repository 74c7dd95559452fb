//! A JSON object a line, plain or compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value};

use super::selection::Cell;
use super::{Content, Document, Selection, SourceError};

pub(crate) struct JsonLines {
    path: PathBuf,
    selection: Selection,
    lines: Box<dyn BufRead + Send>,
    line: u64,
    buffer: Vec<u8>,
    bytes: u64,
    read: Arc<AtomicU64>,
}

/// Counts what is read of a file, compressed as it is.
struct Counting {
    file: File,
    read: Arc<AtomicU64>,
}

impl Read for Counting {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl JsonLines {
    /// Opens a file behind its first `skip` records; blank lines are none.
    pub(super) fn open(path: &Path, selection: &Selection, skip: u64) -> Result<Self, SourceError> {
        let io = |source| SourceError::Io {
            path: path.into(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let read = Arc::new(AtomicU64::new(0));
        let counting = Counting {
            file,
            read: Arc::clone(&read),
        };
        let mut plain = BufReader::with_capacity(1 << 20, counting);
        let head = plain.fill_buf().map_err(io)?;
        // By their first bytes, as names can lie.
        let lines: Box<dyn BufRead + Send> = if head.starts_with(&[0x1f, 0x8b]) {
            Box::new(BufReader::with_capacity(
                1 << 20,
                flate2::bufread::MultiGzDecoder::new(plain),
            ))
        } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            let decoder = zstd::stream::read::Decoder::with_buffer(plain).map_err(io)?;
            Box::new(BufReader::with_capacity(1 << 20, decoder))
        } else {
            Box::new(plain)
        };
        let mut reader = Self {
            path: path.into(),
            selection: selection.clone(),
            lines,
            line: 0,
            buffer: Vec::new(),
            bytes,
            read,
        };
        for _ in 0..skip {
            if !reader.read_line()? {
                return Err(reader.wrong(format!("{skip} records were expected before")));
            }
        }
        Ok(reader)
    }

    pub(super) fn next(&mut self) -> Result<Option<Content>, SourceError> {
        if !self.read_line()? {
            return Ok(None);
        }
        let mut object: Map<String, Value> = serde_json::from_slice(&self.buffer)
            .map_err(|error| self.wrong(format!("no JSON object: {error}")))?;
        for (condition, column) in self.selection.conditions() {
            let cell = match self.value(&object, column)? {
                Value::Number(number) => number.as_f64().map_or(Cell::Null, Cell::Number),
                Value::String(text) => Cell::Text(text),
                _ => Cell::Null,
            };
            if !self.selection.meets(condition, cell) {
                return Ok(Some(Content::Filtered));
            }
        }
        let column = &self.selection.columns.text;
        self.value(&object, column)?;
        match object.remove(column).unwrap_or_default() {
            Value::String(text) => Ok(Some(Content::Document(Document::Text(text)))),
            Value::Null => Ok(Some(Content::Null)),
            _ => Err(self.wrong(format!("`{column}` is no string"))),
        }
    }

    fn value<'a>(
        &self,
        object: &'a Map<String, Value>,
        column: &str,
    ) -> Result<&'a Value, SourceError> {
        object.get(column).ok_or_else(|| {
            let keys: Vec<&str> = object.keys().map(String::as_str).collect();
            self.wrong(format!(
                "it has no `{column}`; its keys are {}",
                keys.join(", ")
            ))
        })
    }

    /// Takes the next line that is not blank into the buffer; `false` at the end.
    fn read_line(&mut self) -> Result<bool, SourceError> {
        loop {
            self.buffer.clear();
            self.line += 1;
            match self.lines.read_until(b'\n', &mut self.buffer) {
                Ok(0) => return Ok(false),
                Ok(_) if self.buffer.trim_ascii().is_empty() => {}
                Ok(_) => return Ok(true),
                Err(error) => {
                    let reason = format!("{error}; the file is damaged, copy it again");
                    return Err(self.wrong(reason));
                }
            }
        }
    }

    pub(super) fn share(&self) -> f64 {
        self.read.load(Ordering::Relaxed) as f64 / self.bytes.max(1) as f64
    }

    fn wrong(&self, reason: String) -> SourceError {
        SourceError::Json {
            path: self.path.clone(),
            line: self.line,
            reason,
        }
    }
}
