//! Files that are not what they should be: each a typed error that names the file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, BinaryArray, Int64Array, StringArray};
use datasets::ParquetError;
use parquet::basic::Compression;
use parquet::file::metadata::{ParquetMetaDataReader, ParquetMetaDataWriter};
use parquet::file::properties::WriterProperties;
use tempfile::tempdir;

use crate::fixtures::{read_texts, write, write_texts};

fn sample(folder: &Path) -> (PathBuf, Vec<u8>) {
    let texts: Vec<String> = (0..300)
        .map(|row| format!("text {row} {}", "ab".repeat(row)))
        .collect();
    let path = write_texts(folder, "sample.parquet", &texts);
    let bytes = std::fs::read(&path).unwrap();
    (path, bytes)
}

#[test]
fn garbage_is_not_parquet() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("garbage.parquet");
    let cases: [(&[u8], &str); 4] = [
        (b"", "empty"),
        (b"{\"text\": \"hello\"}", "{"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "git lfs pull",
        ),
        (&[0xff; 5000], "xff"),
    ];
    for (bytes, says) in cases {
        std::fs::write(&path, bytes).unwrap();
        let error = read_texts(&path).unwrap_err();
        assert!(matches!(error, ParquetError::NotParquet { .. }), "{error}");
        let message = error.to_string();
        assert!(
            message.contains("garbage.parquet") && message.contains(says),
            "{message}"
        );
    }
}

#[test]
fn a_file_cut_anywhere_is_truncated() {
    let folder = tempdir().unwrap();
    let (path, bytes) = sample(folder.path());
    for len in (4..bytes.len()).step_by(97).chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..len]).unwrap();
        let error = read_texts(&path).unwrap_err();
        let is_truncated =
            matches!(error, ParquetError::Truncated { bytes, .. } if bytes == len as u64);
        assert!(is_truncated, "{len}: {error}");
    }
}

/// A flipped byte of text cannot be seen without checksums, but no panic may get out, and no
/// row may go missing unnoticed.
#[test]
fn a_flipped_byte_is_contained_and_loses_no_rows() {
    let folder = tempdir().unwrap();
    let (path, bytes) = sample(folder.path());
    let mut errors = 0;
    let places = (4..bytes.len())
        .step_by(31)
        .chain(bytes.len() - 900..bytes.len());
    for place in places {
        let mut damaged = bytes.clone();
        damaged[place] ^= 0x55;
        std::fs::write(&path, &damaged).unwrap();
        match read_texts(&path) {
            Ok(texts) => assert_eq!(texts.len(), 300, "byte {place}"),
            Err(error) => {
                errors += 1;
                assert!(error.to_string().contains("sample.parquet"), "{error}");
            }
        }
    }
    assert!(errors > 100, "the footer's bytes are seen: {errors}");
}

#[test]
fn without_a_text_column_the_columns_are_listed() {
    let folder = tempdir().unwrap();
    let strings: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1]));
    let columns = vec![
        ("title", Arc::clone(&strings)),
        ("Texts", strings),
        ("score", numbers),
    ];
    let path = write(
        folder.path(),
        "shard.parquet",
        columns,
        WriterProperties::default(),
    );
    let error = read_texts(&path).unwrap_err();
    let message = error.to_string();
    assert!(
        matches!(error, ParquetError::NoTextColumn { .. }),
        "{message}"
    );
    assert!(
        message.contains("shard.parquet has no column `text`"),
        "{message}"
    );
    assert!(
        message.contains("title, Texts, score; did you mean `Texts`?"),
        "{message}"
    );
}

#[test]
fn a_text_column_of_another_type_is_refused() {
    let folder = tempdir().unwrap();
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1]));
    let bytes: ArrayRef = Arc::new(BinaryArray::from_iter_values([b"\xff\xfe"]));
    for (array, found) in [(numbers, "Int64"), (bytes, "Binary")] {
        let columns = vec![("text", array)];
        let path = write(folder.path(), "shard", columns, WriterProperties::default());
        let error = read_texts(&path).unwrap_err();
        let is_found = matches!(&error, ParquetError::NotText { found: is, .. } if is == found);
        assert!(is_found, "{error}");
    }
}

#[test]
fn only_nulls_is_an_error_and_no_rows_is_not() {
    let folder = tempdir().unwrap();
    let nulls: ArrayRef = Arc::new(StringArray::new_null(70));
    let path = write(
        folder.path(),
        "nulls",
        vec![("text", nulls)],
        WriterProperties::default(),
    );
    let error = read_texts(&path).unwrap_err();
    assert!(
        matches!(error, ParquetError::OnlyNulls { rows: 70, .. }),
        "{error}"
    );
    let path = write_texts(folder.path(), "none", &[] as &[&str]);
    assert_eq!(read_texts(&path).unwrap(), []);
}

/// The writer cannot compress with LZO, so the footer is rewritten to say so.
#[test]
fn an_unknown_codec_is_named() {
    let folder = tempdir().unwrap();
    let (path, bytes) = sample(folder.path());
    let metadata = ParquetMetaDataReader::new()
        .parse_and_finish(&File::open(&path).unwrap())
        .unwrap();
    let footer = bytes.len() - 8;
    let footer_len = u32::from_le_bytes(bytes[footer..footer + 4].try_into().unwrap()) as usize;
    let mut builder = metadata.into_builder();
    let groups = builder.take_row_groups().into_iter().map(|group| {
        let mut group = group.into_builder();
        let columns = group.take_columns().into_iter().map(|column| {
            column
                .into_builder()
                .set_compression(Compression::LZO)
                .build()
                .unwrap()
        });
        let columns = columns.collect();
        group.set_column_metadata(columns).build().unwrap()
    });
    let groups = groups.collect();
    let metadata = builder.set_row_groups(groups).build();
    let mut rewritten = bytes[..footer - footer_len].to_vec();
    let mut tail = Vec::new();
    ParquetMetaDataWriter::new(&mut tail, &metadata)
        .finish()
        .unwrap();
    rewritten.extend(tail);
    std::fs::write(&path, rewritten).unwrap();
    let error = read_texts(&path).unwrap_err();
    assert!(
        matches!(&error, ParquetError::Codec { codec, .. } if codec == "LZO"),
        "{error}"
    );
}
