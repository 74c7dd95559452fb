//! Filters and column names, in Parquet and in JSON lines.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, Float64Array, Int32Array, Int64Array, StringArray};
use datasets::{
    Columns, Filters, ParquetError, PrepareError, PrepareOptions, Selection, SourceError,
    Tokenizer, prepare,
};
use parquet::file::properties::WriterProperties;
use tempfile::tempdir;

use crate::fixtures::write;

type Row = (Option<f64>, Option<f64>, Option<i64>, Option<&'static str>);

/// Score, language score, token count and dump of ten texts of 1 to 10 bytes.
fn rows() -> Vec<Row> {
    vec![
        (Some(2.5), Some(0.9), Some(10), Some("a")),
        (Some(3.0), Some(0.9), Some(20), Some("a")),
        (Some(3.5), Some(0.5), Some(30), Some("b")),
        (None, Some(0.9), Some(40), Some("b")),
        (Some(4.0), None, Some(50), Some("c")),
        (Some(4.5), Some(0.65), None, Some("c")),
        (Some(5.0), Some(0.7), Some(60), None),
        (Some(1.0), Some(1.0), Some(70), Some("a")),
        (Some(f64::NAN), Some(0.9), Some(80), Some("a")),
        (Some(3.2), Some(0.8), Some(25), Some("ab")),
    ]
}

fn parquet(folder: &Path, narrow: bool) -> PathBuf {
    let rows = rows();
    let texts = StringArray::from_iter_values((1..=rows.len()).map(|n| "x".repeat(n)));
    let scores = rows.iter().map(|row| row.0);
    let counts = rows.iter().map(|row| row.2);
    let (scores, counts): (ArrayRef, ArrayRef) = if narrow {
        (
            Arc::new(Float32Array::from_iter(
                scores.map(|score| score.map(|s| s as f32)),
            )),
            Arc::new(Int32Array::from_iter(
                counts.map(|count| count.map(|c| c as i32)),
            )),
        )
    } else {
        (
            Arc::new(Float64Array::from_iter(scores)),
            Arc::new(Int64Array::from_iter(counts)),
        )
    };
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("text", Arc::new(texts)),
        ("score", scores),
        (
            "language_score",
            Arc::new(Float64Array::from_iter(rows.iter().map(|row| row.1))),
        ),
        ("token_count", counts),
        (
            "dump",
            Arc::new(StringArray::from_iter(rows.iter().map(|row| row.3))),
        ),
    ];
    let name = if narrow {
        "narrow.parquet"
    } else {
        "wide.parquet"
    };
    write(folder, name, columns, WriterProperties::default())
}

fn json_lines(folder: &Path) -> PathBuf {
    let line = |(number, row): (usize, &Row)| {
        let text = "x".repeat(number + 1);
        let line = serde_json::json!({"text": text, "score": row.0, "language_score": row.1,
            "token_count": row.2, "dump": row.3});
        format!("{line}\n")
    };
    let path = folder.join("rows.jsonl");
    std::fs::write(
        &path,
        rows().iter().enumerate().map(line).collect::<String>(),
    )
    .unwrap();
    path
}

/// The numbers of the rows kept, as the bytes of texts tell: a power of two would do for sums, the
/// order of documents for the rest.
fn kept(source: &Path, filters: &Filters) -> Vec<u64> {
    let folder = tempdir().unwrap();
    let options = PrepareOptions {
        selection: Selection {
            filters: filters.clone(),
            ..Selection::default()
        },
        // A shard a document.
        shard_tokens: 1,
        ..PrepareOptions::default()
    };
    let sources = [source.to_owned()];
    let tokenizer = Tokenizer::byte_level();
    let cache = prepare(&sources, &tokenizer, folder.path(), &options, &mut |_| {}).unwrap();
    let manifest = cache.manifest();
    let kept: Vec<u64> = manifest
        .shards
        .iter()
        .map(|shard| shard.text_bytes)
        .collect();
    assert_eq!(manifest.counts.filtered, 10 - kept.len() as u64);
    kept
}

#[test]
fn filters_keep_what_meets_all_of_them() {
    let folder = tempdir().unwrap();
    let sources = [
        parquet(folder.path(), false),
        parquet(folder.path(), true),
        json_lines(folder.path()),
    ];
    let none = Filters::default();
    let dumps = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let cases = [
        (none.clone(), vec![1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (
            Filters {
                min_score: Some(3.0),
                ..none.clone()
            },
            vec![2, 3, 5, 6, 7, 10],
        ),
        (
            Filters {
                min_language_score: Some(0.65),
                ..none.clone()
            },
            vec![1, 2, 4, 6, 7, 8, 9, 10],
        ),
        (
            Filters {
                min_token_count: Some(20),
                max_token_count: Some(50),
                ..none.clone()
            },
            vec![2, 3, 4, 5, 10],
        ),
        (
            Filters {
                dumps: dumps(&["a", "c"]),
                ..none.clone()
            },
            vec![1, 2, 5, 6, 8, 9],
        ),
        (
            Filters {
                min_score: Some(2.0),
                max_token_count: Some(20),
                dumps: dumps(&["a"]),
                ..none.clone()
            },
            vec![1, 2],
        ),
    ];
    for (filters, expected) in cases {
        for source in &sources {
            assert_eq!(
                kept(source, &filters),
                expected,
                "{}: {filters:?}",
                source.display()
            );
        }
    }
}

#[test]
fn columns_have_the_names_that_the_settings_give() {
    let folder = tempdir().unwrap();
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("text", Arc::new(StringArray::from(vec!["no", "no"]))),
        ("body", Arc::new(StringArray::from(vec!["yes!", "no"]))),
        ("quality", Arc::new(Float64Array::from(vec![1.0, 0.0]))),
    ];
    let source = write(
        folder.path(),
        "a.parquet",
        columns,
        WriterProperties::default(),
    );
    let named = Columns {
        text: "body".into(),
        score: "quality".into(),
        ..Columns::default()
    };
    let make = |columns: Columns| {
        let filters = Filters {
            min_score: Some(0.5),
            ..Filters::default()
        };
        let options = PrepareOptions {
            selection: Selection { columns, filters },
            ..PrepareOptions::default()
        };
        let dir = folder.path().join("cache");
        prepare(
            std::slice::from_ref(&source),
            &Tokenizer::byte_level(),
            &dir,
            &options,
            &mut |_| {},
        )
    };
    let refused = |columns: Columns| match make(columns).unwrap_err() {
        PrepareError::Source(SourceError::Parquet(error)) => error,
        error => panic!("{error}"),
    };
    let error = refused(Columns {
        score: "qualty".into(),
        ..named.clone()
    });
    assert!(
        matches!(error, ParquetError::NoTextColumn { .. }),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("no column `qualty`; its columns are text, body"),
        "{error}"
    );
    let error = refused(Columns {
        score: "text".into(),
        ..named.clone()
    });
    assert!(matches!(error, ParquetError::NotNumbers { .. }), "{error}");
    assert_eq!(make(named).unwrap().manifest().text_bytes(), 4);
}
