//! The default corpus of this very workspace.

use std::path::Path;

use datasets::{CorpusError, Dataset, Tokenizer, corpus};
use parquet::file::reader::{FileReader, SerializedFileReader};
use tempfile::tempdir;

use crate::fixtures::{options, read};

const MANIFEST_DIR: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn two_builds_at_once_give_one_whole_shard_and_the_same_bytes_elsewhere() {
    let (shared, other) = (tempdir().unwrap(), tempdir().unwrap());
    let build = |folder: &Path| corpus::build(Path::new(MANIFEST_DIR), folder).unwrap();
    let (first, second) = std::thread::scope(|scope| {
        let (first, second) = (
            scope.spawn(|| build(shared.path())),
            scope.spawn(|| build(shared.path())),
        );
        (first.join().unwrap(), second.join().unwrap())
    });
    assert_eq!(
        (&first.path, &first.summary),
        (&second.path, &second.summary)
    );
    let elsewhere = build(other.path());
    assert_eq!(first.path.file_name(), elsewhere.path.file_name());
    assert_eq!(
        std::fs::read(&first.path).unwrap(),
        std::fs::read(&elsewhere.path).unwrap()
    );
    assert_eq!(
        std::fs::read_dir(shared.path()).unwrap().count(),
        1,
        "no temporary file is left"
    );

    let reused = build(shared.path());
    assert!(reused.reused && !elsewhere.reused);
    assert_eq!(reused.summary, first.summary);
    assert!(reused.to_string().contains("reused"), "{reused}");

    // A damaged one is no corpus, and is built again.
    std::fs::write(&first.path, b"PAR1 half a file").unwrap();
    assert!(!build(shared.path()).reused);
    assert_eq!(
        std::fs::read(&first.path).unwrap(),
        std::fs::read(&elsewhere.path).unwrap()
    );
}

#[test]
fn the_shard_has_fineweb_edus_columns_and_says_what_it_holds() {
    let folder = tempdir().unwrap();
    let shard = corpus::build(Path::new(MANIFEST_DIR), folder.path()).unwrap();
    let file = std::fs::File::open(&shard.path).unwrap();
    let reader = SerializedFileReader::new(file).unwrap();
    let schema = reader.metadata().file_metadata().schema_descr();
    let columns: Vec<_> = schema
        .columns()
        .iter()
        .map(|column| format!("{} {}", column.name(), column.physical_type()))
        .collect();
    assert_eq!(
        columns,
        [
            "text BYTE_ARRAY",
            "id BYTE_ARRAY",
            "dump BYTE_ARRAY",
            "url BYTE_ARRAY",
            "file_path BYTE_ARRAY",
            "language BYTE_ARRAY",
            "language_score DOUBLE",
            "token_count INT64",
            "score DOUBLE",
            "int_score INT64",
        ]
    );

    let records = read(&shard.path).unwrap();
    let summary = &shard.summary;
    assert_eq!(records.len() as u64, summary.documents);
    let bytes: usize = records
        .iter()
        .map(|record| record.text.as_ref().unwrap().len())
        .sum();
    assert_eq!(bytes as u64, summary.bytes);
    assert!(
        (7_000_000..=8_000_000).contains(&bytes),
        "a few megabytes: {bytes}"
    );
    assert!(
        summary.markdown_bytes > 1_000_000 && summary.rust_bytes > 5_000_000,
        "{summary:?}"
    );
    let ids: std::collections::HashSet<_> = records.iter().map(|record| &record.id).collect();
    assert_eq!(ids.len(), records.len(), "no text twice");
}

#[test]
fn nothing_of_the_machine_is_in_the_shard() {
    let folder = tempdir().unwrap();
    let shard = corpus::build(Path::new(MANIFEST_DIR), folder.path()).unwrap();
    let reader = SerializedFileReader::new(std::fs::File::open(&shard.path).unwrap()).unwrap();
    let home = std::env::var("CARGO_HOME")
        .or_else(|_| std::env::var("HOME"))
        .unwrap();
    let mut paths = Vec::new();
    for row in reader.get_row_iter(None).unwrap() {
        let row = row.unwrap();
        for (name, value) in row.get_column_iter().filter(|(name, _)| *name != "text") {
            let value = value.to_string();
            for machine in [home.as_str(), MANIFEST_DIR, "registry/src"] {
                assert!(!value.contains(machine), "{name}: {value}");
            }
            if name == "file_path" {
                paths.push(value.trim_matches('"').to_owned());
            }
        }
    }
    assert!(
        paths.is_sorted() && !paths[0].starts_with('/'),
        "{}",
        paths[0]
    );
    let rust = |path: &String| path.starts_with("serde_json-1.") && path.ends_with(".rs");
    assert!(
        paths.iter().any(rust),
        "the sources of a known dependency are there"
    );
}

#[test]
fn the_loader_reads_it() {
    let folder = tempdir().unwrap();
    let shard = corpus::build(Path::new(MANIFEST_DIR), folder.path()).unwrap();
    let paths = [folder.path().to_owned()];
    let dataset =
        Dataset::open(&paths, Tokenizer::byte_level(), options(folder.path(), 512)).unwrap();
    let report = dataset.report();
    assert_eq!(
        report.train.documents + report.validation.documents,
        shard.summary.documents
    );
    assert_eq!(
        report.train.bytes + report.validation.bytes,
        shard.summary.bytes
    );
    assert_eq!((report.nulls, report.empties), (0, 0));
}

#[test]
fn without_a_lock_file_the_folder_is_named() {
    let folder = tempdir().unwrap();
    let error = corpus::build(folder.path(), folder.path()).unwrap_err();
    assert!(
        matches!(&error, CorpusError::NoLock { start } if start == folder.path()),
        "{error}"
    );
}

#[test]
fn an_unwritable_folder_is_named() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = corpus::build(Path::new(MANIFEST_DIR), &file.join("cache")).unwrap_err();
    assert!(error.to_string().contains("file/cache"), "{error}");
}
