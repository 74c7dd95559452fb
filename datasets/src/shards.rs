//! Texts out of Parquet shards, a few rows at a time.
//!
//! Columns are read by their Parquet type and not by the Arrow type the writer had: strings,
//! large strings, string views and dictionary-encoded strings are all UTF-8 byte arrays on disk.
//! They are decoded into 64-bit offsets and small batches, because a dictionary page of one long
//! text can stand for many rows, and 2^31 bytes in a batch overflow 32-bit offsets.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{Array, LargeStringArray, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use parquet::basic::Compression;
use parquet::file::metadata::ParquetMetaData;

/// Rows decoded at once. Small, since a single text may have many megabytes.
const BATCH_ROWS: usize = 32;

/// What keeps a shard from being read.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The path does not exist or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A folder without any `*.parquet` file.
    #[error("no *.parquet file in the folder {} (hidden files and subfolders are not looked at); \
             name a Parquet file or the folder that holds the shards", path.display())]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The file does not begin as Parquet files do.
    #[error("{} is not a Parquet file: {reason}", path.display())]
    NotParquet {
        /// The file.
        path: PathBuf,
        /// What it is instead, as far as its first bytes tell.
        reason: String,
    },
    /// The file begins as Parquet but its end, where the index stands, is missing.
    #[error("{} is truncated: {bytes} bytes, and the footer that ends every Parquet file is \
             missing; download or write it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// No column of the wanted name.
    #[error("{} has no column `{column}`; its columns are {}{}", path.display(), found.join(", "),
            suggestion.as_ref().map(|s| format!("; did you mean `{s}`?")).unwrap_or_default())]
    NoTextColumn {
        /// The file.
        path: PathBuf,
        /// The column asked for.
        column: String,
        /// The columns there are.
        found: Vec<String>,
        /// The string column whose name is nearest.
        suggestion: Option<String>,
    },
    /// The column is there but holds something else than strings.
    #[error("{}: column `{column}` holds {found}, not strings; convert it to UTF-8 strings", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
    /// The column is compressed in a way this build cannot undo.
    #[error("{}: column `{column}` is compressed with {codec}, which is not supported; write it \
             with zstd, snappy, gzip, lz4, brotli or uncompressed", path.display())]
    Codec {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// The codec's name.
        codec: String,
    },
    /// The index or a page contradicts itself.
    #[error("{} is damaged near row {row}: {reason}; download or write it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Rows that were read before.
        row: u64,
        /// What the decoder said.
        reason: String,
    },
    /// Fewer or more rows came out than the index promises.
    #[error("{}: the index promises {expected} rows, {found} were read; download or write it again", path.display())]
    RowCount {
        /// The file.
        path: PathBuf,
        /// Rows by the index.
        expected: u64,
        /// Rows read.
        found: u64,
    },
    /// Every text is null.
    #[error("{}: all {rows} values of column `{column}` are null", path.display())]
    OnlyNulls {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// Rows in the file.
        rows: u64,
    },
}

/// The names of the columns to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    /// The documents' texts; must be there.
    pub text: String,
    /// The documents' names; may be missing.
    pub id: String,
}

impl Default for Columns {
    /// FineWeb-Edu's names.
    fn default() -> Self {
        Self {
            text: "text".into(),
            id: "id".into(),
        }
    }
}

/// One row of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The document's name, if the shard has the column and the row a value.
    pub id: Option<String>,
    /// The text; `None` where the shard holds a null, so that the caller can count it.
    pub text: Option<String>,
}

/// Expands files and folders to shards, sorted by path and each named once, so that the order does
/// not depend on the file system. Of a folder, the `*.parquet` files directly in it whose name
/// does not begin with `.` or `_` count: writers leave temporary and bookkeeping files so named.
///
/// # Errors
/// [`ShardError::Io`] for a path that is not there, [`ShardError::EmptyFolder`].
pub fn list(paths: &[PathBuf]) -> Result<Vec<PathBuf>, ShardError> {
    let mut shards = Vec::new();
    for path in paths {
        let io = |source| ShardError::Io {
            path: path.clone(),
            source,
        };
        if !std::fs::metadata(path).map_err(io)?.is_dir() {
            shards.push(path.clone());
            continue;
        }
        let before = shards.len();
        for entry in std::fs::read_dir(path).map_err(io)? {
            let shard = entry.map_err(io)?.path();
            if is_shard_name(&shard) && shard.is_file() {
                shards.push(shard);
            }
        }
        if shards.len() == before {
            return Err(ShardError::EmptyFolder { path: path.clone() });
        }
    }
    shards.sort();
    shards.dedup();
    Ok(shards)
}

fn is_shard_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    !name.starts_with(['.', '_'])
        && path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("parquet"))
}

/// Reads one shard's rows in order, nulls included. Ends with an error if the number of rows is
/// not the index's, or if every text was null. After an error the iterator is at its end.
pub struct ShardReader {
    path: PathBuf,
    columns: Columns,
    reader: ParquetRecordBatchReader,
    batch: Option<Batch>,
    expected: u64,
    rows: u64,
    nulls: u64,
    finished: bool,
}

/// The decoded rows not yet handed out.
struct Batch {
    text: LargeStringArray,
    id: Option<LargeStringArray>,
    next: usize,
}

impl ShardReader {
    /// Opens a shard and checks its index, column types and compression.
    ///
    /// # Errors
    /// Every [`ShardError`] but those about the rows themselves, which come while iterating.
    pub fn open(path: &Path, columns: &Columns) -> Result<Self, ShardError> {
        let file = open_parquet(path)?;
        let damaged = |reason| ShardError::Damaged {
            path: path.to_owned(),
            row: 0,
            reason,
        };
        let by_parquet_type = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let found = contained(|| ArrowReaderMetadata::load(&file, by_parquet_type.clone()))
            .map_err(damaged)?;
        let text = text_column(path, columns, found.schema())?;
        let id = found
            .schema()
            .index_of(&columns.id)
            .ok()
            .filter(|&index| *found.schema().field(index).data_type() == DataType::Utf8);
        check_codec(path, &columns.text, text, &found)?;

        let widened = widen(found.schema(), [Some(text), id]);
        let metadata = contained(|| {
            ArrowReaderMetadata::try_new(
                Arc::clone(found.metadata()),
                by_parquet_type.with_schema(Arc::new(widened)),
            )
        })
        .map_err(damaged)?;
        let expected = row_count(path, &metadata)?;
        check_extents(&file, metadata.metadata()).map_err(damaged)?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), [text].into_iter().chain(id));
        let reader = contained(|| {
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
                .with_projection(mask)
                .with_batch_size(BATCH_ROWS)
                .build()
        })
        .map_err(damaged)?;
        Ok(Self {
            path: path.to_owned(),
            columns: columns.clone(),
            reader,
            batch: None,
            expected,
            rows: 0,
            nulls: 0,
            finished: false,
        })
    }

    /// The number of rows by the index.
    #[must_use]
    pub fn expected_rows(&self) -> u64 {
        self.expected
    }

    fn next_record(&mut self) -> Result<Option<Record>, ShardError> {
        loop {
            if let Some(batch) = self
                .batch
                .as_mut()
                .filter(|batch| batch.next < batch.text.len())
            {
                let row = batch.next;
                let value = |array: &LargeStringArray| {
                    array.is_valid(row).then(|| array.value(row).to_owned())
                };
                let record = Record {
                    id: batch.id.as_ref().and_then(value),
                    text: value(&batch.text),
                };
                batch.next += 1;
                self.rows += 1;
                self.nulls += u64::from(record.text.is_none());
                return Ok(Some(record));
            }
            let batch = contained(|| self.reader.next().transpose());
            match batch.map_err(|reason| self.damaged(reason))? {
                Some(batch) => self.batch = Some(self.unpack(&batch)?),
                None => return self.check_end().map(|()| None),
            }
        }
    }

    fn unpack(&self, batch: &RecordBatch) -> Result<Batch, ShardError> {
        let strings = |name: &str| {
            let column = batch.column_by_name(name)?;
            column.as_any().downcast_ref::<LargeStringArray>().cloned()
        };
        let text = strings(&self.columns.text)
            .ok_or_else(|| self.damaged(format!("column `{}` vanished", self.columns.text)))?;
        Ok(Batch {
            text,
            id: strings(&self.columns.id),
            next: 0,
        })
    }

    fn check_end(&self) -> Result<(), ShardError> {
        let path = || self.path.clone();
        if self.rows != self.expected {
            return Err(ShardError::RowCount {
                path: path(),
                expected: self.expected,
                found: self.rows,
            });
        }
        if self.rows > 0 && self.nulls == self.rows {
            let column = self.columns.text.clone();
            return Err(ShardError::OnlyNulls {
                path: path(),
                column,
                rows: self.rows,
            });
        }
        Ok(())
    }

    fn damaged(&self, reason: String) -> ShardError {
        ShardError::Damaged {
            path: self.path.clone(),
            row: self.rows,
            reason,
        }
    }
}

impl Iterator for ShardReader {
    type Item = Result<Record, ShardError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        let next = self.next_record().transpose();
        self.finished = !matches!(next, Some(Ok(_)));
        next
    }
}

/// Opens the file and looks at both ends, so that the common accidents are told apart.
fn open_parquet(path: &Path) -> Result<File, ShardError> {
    const MAGIC: &[u8; 4] = b"PAR1";
    let io = |source| ShardError::Io {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    let mut head = Vec::new();
    Read::by_ref(&mut file)
        .take(64)
        .read_to_end(&mut head)
        .map_err(io)?;
    if !head.starts_with(MAGIC) {
        let reason = match &head[..] {
            [] => "it is empty".to_owned(),
            head if head.starts_with(b"version https://git-lfs") => {
                "it is a Git LFS pointer; run `git lfs pull` to fetch the file itself".to_owned()
            }
            head if head.starts_with(b"PARE") => "its footer is encrypted".to_owned(),
            head => format!(
                "it begins with \"{}\"",
                head[..head.len().min(8)].escape_ascii()
            ),
        };
        return Err(ShardError::NotParquet {
            path: path.to_owned(),
            reason,
        });
    }
    let mut tail = [0; 4];
    file.seek(SeekFrom::End(-4)).map_err(io)?;
    file.read_exact(&mut tail).map_err(io)?;
    // Magic, footer length and magic again take twelve bytes.
    if &tail != MAGIC || bytes < 12 {
        return Err(ShardError::Truncated {
            path: path.to_owned(),
            bytes,
        });
    }
    Ok(file)
}

/// The text column's place among the schema's root fields.
fn text_column(path: &Path, columns: &Columns, schema: &Schema) -> Result<usize, ShardError> {
    let column = columns.text.clone();
    let Ok(index) = schema.index_of(&column) else {
        let nearest = |field: &&Arc<Field>| {
            (1e6 * strsim::jaro_winkler(&column.to_lowercase(), &field.name().to_lowercase()))
                as u32
        };
        let strings = schema
            .fields()
            .iter()
            .filter(|field| *field.data_type() == DataType::Utf8);
        return Err(ShardError::NoTextColumn {
            path: path.to_owned(),
            suggestion: strings
                .max_by_key(nearest)
                .map(|field| field.name().clone()),
            found: schema
                .fields()
                .iter()
                .map(|field| field.name().clone())
                .collect(),
            column,
        });
    };
    match schema.field(index).data_type() {
        DataType::Utf8 => Ok(index),
        found => Err(ShardError::NotText {
            path: path.to_owned(),
            column,
            found: found.to_string(),
        }),
    }
}

/// Every column chunk must lie within the file: the decoder takes its word for it.
fn check_extents(file: &File, metadata: &ParquetMetaData) -> Result<(), String> {
    let bytes = file.metadata().map_err(|error| error.to_string())?.len();
    for column in metadata
        .row_groups()
        .iter()
        .flat_map(|group| group.columns())
    {
        let dictionary = column.dictionary_page_offset();
        let start = dictionary.unwrap_or(column.data_page_offset());
        let len = column.compressed_size();
        let end = u64::try_from(start).ok().zip(u64::try_from(len).ok());
        let end = end.and_then(|(start, len)| start.checked_add(len));
        if end.is_none_or(|end| end > bytes) {
            let name = column.column_path();
            return Err(format!(
                "column {name} is said to begin at {start} and have {len} bytes"
            ));
        }
    }
    Ok(())
}

/// Runs a step of the Parquet decoder, which asserts some things about the file that a flipped
/// bit can make false. The decoder is not used again after a panic.
fn contained<T, E: ToString>(step: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the decoder found a contradiction and gave up".to_owned()),
    }
}

fn check_codec(
    path: &Path,
    column: &str,
    root: usize,
    metadata: &ArrowReaderMetadata,
) -> Result<(), ShardError> {
    let schema = metadata.parquet_schema();
    for group in metadata.metadata().row_groups() {
        for (leaf, chunk) in group.columns().iter().enumerate() {
            if schema.get_column_root_idx(leaf) == root && chunk.compression() == Compression::LZO {
                return Err(ShardError::Codec {
                    path: path.to_owned(),
                    column: column.to_owned(),
                    codec: chunk.compression().to_string(),
                });
            }
        }
    }
    Ok(())
}

/// The schema with 64-bit offsets for the columns that are read.
fn widen(schema: &Schema, wide: [Option<usize>; 2]) -> Schema {
    let fields = schema.fields().iter().enumerate().map(|(index, field)| {
        if wide.contains(&Some(index)) {
            Arc::new(field.as_ref().clone().with_data_type(DataType::LargeUtf8))
        } else {
            Arc::clone(field)
        }
    });
    Schema::new(fields.collect::<Vec<_>>())
}

/// The rows the index promises; the file's total must be the sum over its row groups.
fn row_count(path: &Path, metadata: &ArrowReaderMetadata) -> Result<u64, ShardError> {
    let total = metadata.metadata().file_metadata().num_rows();
    let sum: i64 = metadata
        .metadata()
        .row_groups()
        .iter()
        .map(|group| group.num_rows())
        .sum();
    u64::try_from(total)
        .ok()
        .filter(|_| total == sum)
        .ok_or_else(|| ShardError::Damaged {
            path: path.to_owned(),
            row: 0,
            reason: format!("the index promises {total} rows but its row groups hold {sum}"),
        })
}
