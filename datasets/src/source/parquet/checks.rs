//! What is looked at before a shard is read, so that the common accidents are told apart.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::basic::Compression;
use parquet::file::metadata::ParquetMetaData;

use super::ParquetError;

/// Opens the file and looks at both ends, so that the common accidents are told apart.
pub(super) fn open_parquet(path: &Path) -> Result<File, ParquetError> {
    const MAGIC: &[u8; 4] = b"PAR1";
    let io = |source| ParquetError::Io {
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
        return Err(ParquetError::NotParquet {
            path: path.to_owned(),
            reason,
        });
    }
    let mut tail = [0; 4];
    file.seek(SeekFrom::End(-4)).map_err(io)?;
    file.read_exact(&mut tail).map_err(io)?;
    // Magic, footer length and magic again take twelve bytes.
    if &tail != MAGIC || bytes < 12 {
        return Err(ParquetError::Truncated {
            path: path.to_owned(),
            bytes,
        });
    }
    Ok(file)
}

/// The place of a column of numbers among the schema's root fields.
pub(super) fn number_column(
    path: &Path,
    column: &str,
    schema: &Schema,
) -> Result<usize, ParquetError> {
    let index = column_index(path, column, schema)?;
    match schema.field(index).data_type() {
        DataType::Float64 | DataType::Float32 | DataType::Int64 | DataType::Int32 => Ok(index),
        found => Err(ParquetError::NotNumbers {
            path: path.to_owned(),
            column: column.to_owned(),
            found: found.to_string(),
        }),
    }
}

/// The place of a column of strings among the schema's root fields.
pub(super) fn text_column(
    path: &Path,
    column: &str,
    schema: &Schema,
) -> Result<usize, ParquetError> {
    let index = column_index(path, column, schema)?;
    match schema.field(index).data_type() {
        DataType::Utf8 => Ok(index),
        found => Err(ParquetError::NotText {
            path: path.to_owned(),
            column: column.to_owned(),
            found: found.to_string(),
        }),
    }
}

fn column_index(path: &Path, column: &str, schema: &Schema) -> Result<usize, ParquetError> {
    let Ok(index) = schema.index_of(column) else {
        let nearest = |field: &&Arc<Field>| {
            (1e6 * strsim::jaro_winkler(&column.to_lowercase(), &field.name().to_lowercase()))
                as u32
        };
        let strings = schema
            .fields()
            .iter()
            .filter(|field| *field.data_type() == DataType::Utf8);
        return Err(ParquetError::NoTextColumn {
            path: path.to_owned(),
            suggestion: strings
                .max_by_key(nearest)
                .map(|field| field.name().clone()),
            found: schema
                .fields()
                .iter()
                .map(|field| field.name().clone())
                .collect(),
            column: column.to_owned(),
        });
    };
    Ok(index)
}

/// Every column chunk must lie within the file: the decoder takes its word for it.
pub(super) fn check_extents(file: &File, metadata: &ParquetMetaData) -> Result<(), String> {
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
pub(super) fn contained<T, E: ToString>(step: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the decoder found a contradiction and gave up".to_owned()),
    }
}

pub(super) fn check_codec(
    path: &Path,
    column: &str,
    root: usize,
    metadata: &ArrowReaderMetadata,
) -> Result<(), ParquetError> {
    let schema = metadata.parquet_schema();
    for group in metadata.metadata().row_groups() {
        for (leaf, chunk) in group.columns().iter().enumerate() {
            if schema.get_column_root_idx(leaf) == root && chunk.compression() == Compression::LZO {
                return Err(ParquetError::Codec {
                    path: path.to_owned(),
                    column: column.to_owned(),
                    codec: chunk.compression().to_string(),
                });
            }
        }
    }
    Ok(())
}

/// The schema with 64-bit offsets for the strings that are read.
pub(super) fn widen(schema: &Schema, read: &[usize]) -> Schema {
    let fields = schema.fields().iter().enumerate().map(|(index, field)| {
        if read.contains(&index) && *field.data_type() == DataType::Utf8 {
            Arc::new(field.as_ref().clone().with_data_type(DataType::LargeUtf8))
        } else {
            Arc::clone(field)
        }
    });
    Schema::new(fields.collect::<Vec<_>>())
}

/// The rows the index promises; the file's total must be the sum over its row groups.
pub(super) fn row_count(path: &Path, metadata: &ArrowReaderMetadata) -> Result<u64, ParquetError> {
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
        .ok_or_else(|| ParquetError::Damaged {
            path: path.to_owned(),
            row: 0,
            reason: format!("the index promises {total} rows but its row groups hold {sum}"),
        })
}
