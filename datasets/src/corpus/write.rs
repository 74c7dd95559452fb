//! The shard file: FineWeb-Edu's columns, the summary in the footer, written atomically.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::select::Document;
use super::{CorpusError, Summary};
use crate::atomic::Unfinished;

/// Where the summary stands in the footer.
const SUMMARY_KEY: &str = "flamia.corpus";

/// As in FineWeb-Edu's own shards.
const ROW_GROUP_ROWS: usize = 1000;

/// The summary of a corpus written before; `None` if there is none or it cannot be read.
pub(super) fn read_summary(path: &Path) -> Option<Summary> {
    let reader = SerializedFileReader::new(File::open(path).ok()?).ok()?;
    let pairs = reader.metadata().file_metadata().key_value_metadata()?;
    let summary = pairs
        .iter()
        .find(|pair| pair.key == SUMMARY_KEY)?
        .value
        .as_ref()?;
    serde_json::from_str(summary).ok()
}

/// `path` is whole or absent at every moment.
pub(super) fn write(
    path: &Path,
    identity: &str,
    documents: &[Document],
    summary: &Summary,
) -> Result<(), CorpusError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| CorpusError::Io {
            action,
            path,
            source,
        }
    };
    std::fs::create_dir_all(folder).map_err(io("create", folder))?;
    let mut unfinished = Unfinished::create(path).map_err(io("write in", folder))?;
    encode(unfinished.file(), identity, documents, summary).map_err(|error| {
        CorpusError::Write {
            path: path.to_owned(),
            reason: error.to_string(),
        }
    })?;
    unfinished.finish().map_err(io("write", path))
}

fn encode(
    file: &mut (impl Write + Send),
    identity: &str,
    documents: &[Document],
    summary: &Summary,
) -> Result<(), ParquetError> {
    let summary = serde_json::to_string(summary).map_err(|e| ParquetError::External(e.into()))?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
        .set_key_value_metadata(Some(vec![KeyValue::new(SUMMARY_KEY.to_owned(), summary)]))
        .build();
    let batch = batch(identity, documents)?;
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties))?;
    writer.write(&batch)?;
    writer.close()?;
    Ok(())
}

/// FineWeb-Edu's columns in its order. No classifier scored these texts, so `score` and
/// `int_score` are 0; `token_count` is that of the byte-level tokenizer.
fn batch(identity: &str, documents: &[Document]) -> Result<RecordBatch, ParquetError> {
    let strings = |value: &dyn Fn(&Document) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(documents.iter().map(value)))
    };
    let constant = |value: f64| -> ArrayRef {
        Arc::new(Float64Array::from_iter_values(
            documents.iter().map(|_| value),
        ))
    };
    let integers = |value: &dyn Fn(&Document) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(documents.iter().map(value)))
    };
    let dump = format!("Cargo.lock-{}", &identity[..16]);
    let columns = [
        ("text", strings(&|document| document.text.clone())),
        (
            "id",
            strings(&|document| format!("<urn:sha256:{}>", document.text_hash)),
        ),
        ("dump", strings(&|_| dump.clone())),
        ("url", strings(&|document| document.url.clone())),
        ("file_path", strings(&|document| document.file_path.clone())),
        (
            "language",
            strings(&|document| document.kind.language().to_owned()),
        ),
        ("language_score", constant(1.0)),
        (
            "token_count",
            integers(&|document| document.text.len() as i64),
        ),
        ("score", constant(0.0)),
        ("int_score", integers(&|_| 0)),
    ];
    let nullable = |(name, column): &(&str, ArrayRef)| {
        let data_type: &DataType = column.data_type();
        Field::new(*name, data_type.clone(), true)
    };
    let schema = Schema::new(columns.iter().map(nullable).collect::<Vec<_>>());
    let arrays = columns.into_iter().map(|(_, column)| column).collect();
    Ok(RecordBatch::try_new(Arc::new(schema), arrays)?)
}
