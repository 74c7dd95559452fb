//! Every way strings are stored, and the sizes that overflow 32-bit offsets.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::StringDictionaryBuilder;
use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, Int64Array, LargeStringArray, RecordBatch, StringArray, StringViewArray, StructArray,
};
use arrow_schema::{DataType, Field};
use datasets::source::{Place, SourceFile};
use datasets::{Hub, ParquetReader, Selection, SourceError};
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterProperties;
use tempfile::tempdir;

use crate::fixtures::{read, read_texts, write, write_texts};

fn list(sources: &[PathBuf]) -> Result<Vec<PathBuf>, SourceError> {
    let path = |file: SourceFile| match file.place {
        Place::Local(path) => path,
        Place::Hub(file) => panic!("{file}"),
    };
    let files = datasets::source::list(sources, &Hub::from_env())?;
    Ok(files.into_iter().map(path).collect())
}

fn texts() -> Vec<Option<String>> {
    let text = |row: usize| (row % 7 != 3).then(|| format!("text {} ü\n", row % 50));
    (0..500).map(text).collect()
}

#[test]
fn strings_of_every_arrow_type_read_alike() {
    let folder = tempdir().unwrap();
    let mut dictionary = StringDictionaryBuilder::<Int32Type>::new();
    texts()
        .iter()
        .for_each(|text| dictionary.append_option(text.as_ref()));
    let arrays: [(&str, ArrayRef); 4] = [
        ("string", Arc::new(StringArray::from_iter(texts()))),
        ("large", Arc::new(LargeStringArray::from_iter(texts()))),
        ("view", Arc::new(StringViewArray::from_iter(texts()))),
        ("dictionary", Arc::new(dictionary.finish())),
    ];
    for (name, array) in arrays {
        let path = write(
            folder.path(),
            name,
            vec![("text", array)],
            WriterProperties::default(),
        );
        assert_eq!(read_texts(&path).unwrap(), texts(), "{name}");
    }
}

#[test]
fn every_codec_and_row_group_size_reads_alike() {
    let folder = tempdir().unwrap();
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(GzipLevel::default()),
        Compression::ZSTD(ZstdLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
        Compression::LZ4_RAW,
    ];
    for codec in codecs {
        for dictionary in [false, true] {
            let properties = WriterProperties::builder()
                .set_compression(codec)
                .set_dictionary_enabled(dictionary)
                .set_max_row_group_row_count(Some(90))
                .set_data_page_row_count_limit(17);
            let text: ArrayRef = Arc::new(StringArray::from_iter(texts()));
            let path = write(
                folder.path(),
                "shard",
                vec![("text", text)],
                properties.build(),
            );
            assert_eq!(read_texts(&path).unwrap(), texts(), "{codec} {dictionary}");
        }
    }
}

#[test]
fn other_columns_nested_ones_too_are_passed_over() {
    let folder = tempdir().unwrap();
    let strings = |letter: &str| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(
            (0..100).map(|row| format!("{letter}{row}")),
        ))
    };
    let field = Arc::new(Field::new("text", DataType::Utf8, true));
    let nested: ArrayRef = Arc::new(StructArray::from(vec![(field, strings("nested"))]));
    let score: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
    let columns = vec![
        ("meta", nested),
        ("id", strings("id")),
        ("score", score),
        ("text", strings("text")),
    ];
    let path = write(folder.path(), "shard", columns, WriterProperties::default());
    for (row, record) in read(&path).unwrap().into_iter().enumerate() {
        assert_eq!(record.text, Some(format!("text{row}")));
        assert_eq!(record.id, Some(format!("id{row}")));
    }
}

#[test]
fn a_missing_or_foreign_id_column_is_no_obstacle() {
    let folder = tempdir().unwrap();
    let text: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    let id: ArrayRef = Arc::new(Int64Array::from(vec![5]));
    let columns = vec![("id", id), ("text", text)];
    let path = write(folder.path(), "shard", columns, WriterProperties::default());
    let records = read(&path).unwrap();
    assert_eq!(
        (records[0].id.as_deref(), records[0].text.as_deref()),
        (None, Some("a"))
    );
}

/// Report DAT-01, first file: 2.5 GB of text in one column chunk.
#[test]
fn more_than_two_gigabytes_in_a_column_chunk() {
    const ROWS: usize = 500;
    const LEN: usize = 5_068_563;
    let folder = tempdir().unwrap();
    let path = folder.path().join("large.parquet");
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_dictionary_enabled(false)
        .build();
    let letter = |row: usize| (b'a' + (row % 26) as u8) as char;
    let batch = |row: usize| {
        let text: ArrayRef = Arc::new(StringArray::from(vec![letter(row).to_string().repeat(LEN)]));
        RecordBatch::try_from_iter([("text", text)]).unwrap()
    };
    let file = File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch(0).schema(), Some(properties)).unwrap();
    (0..ROWS).for_each(|row| writer.write(&batch(row)).unwrap());
    assert_eq!(writer.close().unwrap().row_groups().len(), 1);

    let shard = ParquetReader::open(&path, &Default::default()).unwrap();
    let mut rows = 0;
    for record in shard {
        let text = record.unwrap().text.unwrap();
        assert_eq!((text.len(), text.chars().next()), (LEN, Some(letter(rows))));
        rows += 1;
    }
    assert_eq!(rows, ROWS);
}

/// Report DAT-01, second file: a dictionary page of one 4 MB text, and 600 nulls; and the same
/// page standing for 600 rows, which is 2.4 GB of text in a file of a few kilobytes.
#[test]
fn a_long_text_in_a_dictionary_page() {
    let folder = tempdir().unwrap();
    let long = "x".repeat(4_000_000);
    for repeated in [None, Some(&long)] {
        let mut text = StringDictionaryBuilder::<Int32Type>::new();
        text.append_value(&long);
        (0..600).for_each(|_| text.append_option(repeated));
        let text: ArrayRef = Arc::new(text.finish());
        let path = write(
            folder.path(),
            "dictionary",
            vec![("text", text)],
            WriterProperties::default(),
        );
        let shard = ParquetReader::open(&path, &Default::default()).unwrap();
        let lengths: Vec<Option<usize>> = shard
            .map(|record| record.unwrap().text.map(|text| text.len()))
            .collect();
        let expected = [Some(long.len())].into_iter();
        let rest = (0..600).map(|_| repeated.map(String::len));
        assert_eq!(lengths, expected.chain(rest).collect::<Vec<_>>());
    }
}

/// Files that `tests/data/make_pyarrow.py` wrote: strings, large strings, views and dictionaries,
/// nulls, snappy and zstd, both page versions, four row groups, a nested column beside.
#[test]
fn files_of_pyarrow_read_alike() {
    let text = |row: usize| (row % 7 != 3).then(|| format!("text {} ü 🦀\n", row % 20));
    let expected: Vec<Option<String>> = (0..60).map(text).collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let files = list(&[folder]).unwrap();
    assert_eq!(files.len(), 5);
    for file in files {
        assert_eq!(read_texts(&file).unwrap(), expected, "{}", file.display());
        for skip in [1, 16, 17, 18, 59, 60] {
            let rest = ParquetReader::open_at(&file, &Selection::default(), skip).unwrap();
            let rest: Vec<Option<String>> = rest.map(|record| record.unwrap().text).collect();
            assert_eq!(
                rest,
                expected[skip as usize..],
                "{} behind {skip}",
                file.display()
            );
        }
    }
}

#[test]
fn a_folder_lists_its_shards_in_order_and_nothing_else() {
    let folder = tempdir().unwrap();
    for name in [
        "b.parquet",
        "a.PARQUET",
        ".a.parquet",
        "_metadata.parquet",
        "a.parquet.tmp",
    ] {
        write_texts(folder.path(), name, &["x"]);
    }
    std::fs::create_dir(folder.path().join("c.parquet")).unwrap();
    let path = |name: &str| folder.path().join(name);
    let shards = list(&[path("b.parquet"), folder.path().to_owned()]).unwrap();
    assert_eq!(shards, [path("a.PARQUET"), path("b.parquet")]);
}

#[test]
fn an_empty_folder_and_a_missing_path_are_named() {
    let folder = tempdir().unwrap();
    let empty = list(&[folder.path().to_owned()]).unwrap_err();
    assert!(matches!(&empty, SourceError::EmptyFolder { path } if path == folder.path()));
    let missing = list(&[PathBuf::from("no/such/shard.parquet")]).unwrap_err();
    assert!(
        missing.to_string().contains("no/such/shard.parquet"),
        "{missing}"
    );
}
