//! Texts out of Parquet shards, a few rows at a time.
//!
//! Columns are read by their Parquet type and not by the Arrow type the writer had: strings,
//! large strings, string views and dictionary-encoded strings are all UTF-8 byte arrays on disk.
//! They are decoded into 64-bit offsets and small batches, because a dictionary page of one long
//! text can stand for many rows, and 2^31 bytes in a batch overflow 32-bit offsets.

mod checks;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, Float32Array, Float64Array, Int32Array, Int64Array, LargeStringArray,
    RecordBatch,
};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};

use checks::{
    check_codec, check_extents, contained, number_column, open_parquet, row_count, text_column,
    widen,
};

use super::selection::{Cell, Columns, Condition, Selection};

/// Rows decoded at once. Small, since a single text may have many megabytes.
const BATCH_ROWS: usize = 32;

/// What keeps a shard from being read.
#[derive(Debug, thiserror::Error)]
pub enum ParquetError {
    /// The path does not exist or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
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
    /// The column of a filter holds something else than numbers.
    #[error("{}: the filter's column `{column}` holds {found}, not numbers", path.display())]
    NotNumbers {
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

/// One row of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The document's name, if the shard has the column and the row a value.
    pub id: Option<String>,
    /// The text; `None` where the shard holds a null, so that the caller can count it, and in rows
    /// that a filter leaves out.
    pub text: Option<String>,
    /// A filter leaves it out.
    pub filtered: bool,
}

/// Reads one shard's rows in order, nulls included. Ends with an error if the number of rows is
/// not the index's, or if every text was null. After an error the iterator is at its end.
pub struct ParquetReader {
    path: PathBuf,
    selection: Selection,
    reader: ParquetRecordBatchReader,
    batch: Option<Batch>,
    expected: u64,
    /// Read, or passed over at the start.
    rows: u64,
    nulls: u64,
    finished: bool,
}

/// The decoded rows not yet handed out.
struct Batch {
    text: LargeStringArray,
    id: Option<LargeStringArray>,
    /// What the filters look at.
    conditions: Vec<(Condition, ArrayRef)>,
    next: usize,
}

impl ParquetReader {
    /// Opens a shard and checks its index, column types and compression.
    ///
    /// # Errors
    /// Every [`ParquetError`] but those about the rows themselves, which come while iterating.
    pub fn open(path: &Path, selection: &Selection) -> Result<Self, ParquetError> {
        Self::open_at(path, selection, 0)
    }

    /// As [`Self::open`], behind the first `skip` rows.
    ///
    /// # Errors
    /// As there.
    pub fn open_at(path: &Path, selection: &Selection, skip: u64) -> Result<Self, ParquetError> {
        let file = open_parquet(path)?;
        let damaged = |reason| ParquetError::Damaged {
            path: path.to_owned(),
            row: 0,
            reason,
        };
        let by_parquet_type = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let found = contained(|| ArrowReaderMetadata::load(&file, by_parquet_type.clone()))
            .map_err(damaged)?;
        let text = text_column(path, &selection.columns.text, found.schema())?;
        let id = found
            .schema()
            .index_of(&selection.columns.id)
            .ok()
            .filter(|&index| *found.schema().field(index).data_type() == DataType::Utf8);
        let mut columns: Vec<usize> = [text].into_iter().chain(id).collect();
        for (condition, column) in selection.conditions() {
            columns.push(match condition {
                Condition::Dump => text_column(path, column, found.schema())?,
                _ => number_column(path, column, found.schema())?,
            });
        }
        check_codec(path, &selection.columns.text, text, &found)?;

        let widened = widen(found.schema(), &columns);
        let metadata = contained(|| {
            ArrowReaderMetadata::try_new(
                Arc::clone(found.metadata()),
                by_parquet_type.with_schema(Arc::new(widened)),
            )
        })
        .map_err(damaged)?;
        let expected = row_count(path, &metadata)?;
        check_extents(&file, metadata.metadata()).map_err(damaged)?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), columns);
        let reader = contained(|| {
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
                .with_projection(mask)
                .with_batch_size(BATCH_ROWS)
                .with_offset(skip as usize)
                .build()
        })
        .map_err(damaged)?;
        Ok(Self {
            path: path.to_owned(),
            selection: selection.clone(),
            reader,
            batch: None,
            expected,
            rows: skip,
            nulls: 0,
            finished: false,
        })
    }

    /// The number of rows by the index.
    #[must_use]
    pub fn expected_rows(&self) -> u64 {
        self.expected
    }

    pub(super) fn share(&self) -> f64 {
        self.rows as f64 / self.expected.max(1) as f64
    }

    fn next_record(&mut self) -> Result<Option<Record>, ParquetError> {
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
                let selection = &self.selection;
                let filtered = !batch
                    .conditions
                    .iter()
                    .all(|(condition, array)| selection.meets(*condition, cell(array, row)));
                let is_null = batch.text.is_null(row);
                let record = Record {
                    id: batch.id.as_ref().and_then(value),
                    text: (!filtered).then(|| value(&batch.text)).flatten(),
                    filtered,
                };
                batch.next += 1;
                self.rows += 1;
                self.nulls += u64::from(is_null);
                return Ok(Some(record));
            }
            let batch = contained(|| self.reader.next().transpose());
            match batch.map_err(|reason| self.damaged(reason))? {
                Some(batch) => self.batch = Some(self.unpack(&batch)?),
                None => return self.check_end().map(|()| None),
            }
        }
    }

    fn unpack(&self, batch: &RecordBatch) -> Result<Batch, ParquetError> {
        let column = |name: &str| {
            batch
                .column_by_name(name)
                .ok_or_else(|| self.damaged(format!("column `{name}` vanished")))
        };
        let strings = |array: &ArrayRef| array.as_any().downcast_ref::<LargeStringArray>().cloned();
        let Columns { text, id, .. } = &self.selection.columns;
        let conditions = self.selection.conditions().into_iter();
        Ok(Batch {
            text: strings(column(text)?)
                .ok_or_else(|| self.damaged(format!("column `{text}` holds no strings")))?,
            id: batch.column_by_name(id).and_then(strings),
            conditions: conditions
                .map(|(condition, name)| Ok((condition, Arc::clone(column(name)?))))
                .collect::<Result<_, ParquetError>>()?,
            next: 0,
        })
    }

    fn check_end(&self) -> Result<(), ParquetError> {
        let path = || self.path.clone();
        if self.rows != self.expected {
            return Err(ParquetError::RowCount {
                path: path(),
                expected: self.expected,
                found: self.rows,
            });
        }
        if self.rows > 0 && self.nulls == self.rows {
            let column = self.selection.columns.text.clone();
            return Err(ParquetError::OnlyNulls {
                path: path(),
                column,
                rows: self.rows,
            });
        }
        Ok(())
    }

    fn damaged(&self, reason: String) -> ParquetError {
        ParquetError::Damaged {
            path: self.path.clone(),
            row: self.rows,
            reason,
        }
    }
}

impl Iterator for ParquetReader {
    type Item = Result<Record, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        let next = self.next_record().transpose();
        self.finished = !matches!(next, Some(Ok(_)));
        next
    }
}

/// A value that a filter looks at.
fn cell(array: &ArrayRef, row: usize) -> Cell<'_> {
    if array.is_null(row) {
        return Cell::Null;
    }
    let any = array.as_any();
    if let Some(texts) = any.downcast_ref::<LargeStringArray>() {
        Cell::Text(texts.value(row))
    } else if let Some(numbers) = any.downcast_ref::<Float64Array>() {
        Cell::Number(numbers.value(row))
    } else if let Some(numbers) = any.downcast_ref::<Float32Array>() {
        Cell::Number(numbers.value(row).into())
    } else if let Some(numbers) = any.downcast_ref::<Int64Array>() {
        Cell::Number(numbers.value(row) as f64)
    } else if let Some(numbers) = any.downcast_ref::<Int32Array>() {
        Cell::Number(numbers.value(row).into())
    } else {
        Cell::Null
    }
}
