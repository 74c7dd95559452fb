//! The split, the shuffles, and resuming.

use std::collections::HashSet;
use std::sync::Arc;

use arrow_array::{ArrayRef, StringArray};
use datasets::{Dataset, DatasetError, OpenOptions, Position, Row, Tokenizer};
use parquet::file::properties::WriterProperties;
use tempfile::tempdir;

use crate::fixtures::{Opened, open_texts, options, write, write_texts};

fn texts() -> Vec<String> {
    (0..120)
        .map(|index| format!("{index} {}", "word ".repeat(1 + index * 7 % 40)))
        .collect()
}

fn labels(rows: impl Iterator<Item = Row>) -> Vec<i64> {
    let mut labels: Vec<i64> = rows.flat_map(|row| row.labels).collect();
    labels.sort_unstable();
    labels
}

#[test]
fn resuming_at_every_position_gives_the_same_rows() {
    let dataset = open_texts(&texts(), 64, 0.1).unwrap();
    let mut stream = dataset.stream().unwrap();
    let mut steps: Vec<(Position, Row)> = Vec::new();
    while stream.position().epoch < 3 {
        let position = stream.position();
        steps.push((position, stream.next().unwrap().unwrap()));
    }
    for (index, (position, _)) in steps.iter().enumerate() {
        let saved = serde_json::to_string(position).unwrap();
        let position: Position = serde_json::from_str(&saved).unwrap();
        let resumed = dataset.stream_from(position).unwrap();
        for (row, (_, expected)) in resumed.zip(&steps[index..]).take(5) {
            assert_eq!(row.unwrap(), *expected, "{saved}");
        }
    }
    // A position taken at an epoch's end goes on with the next epoch, and skips none.
    let ends: Vec<_> = steps
        .windows(2)
        .filter(|w| w[0].0.epoch != w[1].0.epoch)
        .collect();
    assert_eq!(ends.len(), 2);
}

#[test]
fn epochs_hold_the_same_text_in_another_order() {
    let dataset = open_texts(&texts(), 64, 0.1).unwrap();
    let epoch = |epoch: u64| -> Vec<Row> {
        let mut stream = dataset.stream_from(Position { epoch, row: 0 }).unwrap();
        let mut rows = Vec::new();
        loop {
            let row = stream.next().unwrap().unwrap();
            if stream.position().epoch != epoch {
                return rows;
            }
            rows.push(row);
        }
    };
    let text = |rows: Vec<Row>| {
        let mut labels = labels(rows.into_iter());
        labels.retain(|&label| label >= 0);
        labels
    };
    let (first, second) = (epoch(0), epoch(1));
    assert_eq!(first.len() as u64, dataset.report().train.rows);
    assert_ne!(first, second);
    // A stream gives the packed rows, each once, in an order of its own.
    let packed: Vec<Row> = dataset.packed_rows(0).map(Result::unwrap).collect();
    assert_ne!(first, packed);
    let sorted = |rows: &[Row]| {
        let mut rows: Vec<_> = rows.iter().map(|row| row.labels.clone()).collect();
        rows.sort();
        rows
    };
    assert_eq!(sorted(&first), sorted(&packed));
    assert_eq!(text(first), text(second));
}

#[test]
fn a_position_beyond_the_epoch_is_refused() {
    let dataset = open_texts(&texts(), 64, 0.1).unwrap();
    let rows = dataset.report().train.rows;
    assert!(
        dataset
            .stream_from(Position {
                epoch: 0,
                row: rows
            })
            .is_ok()
    );
    let beyond = Position {
        epoch: 0,
        row: rows + 1,
    };
    match dataset.stream_from(beyond).err().unwrap() {
        DatasetError::PositionBeyondEpoch { rows: found, .. } => assert_eq!(found, rows),
        error => panic!("{error}"),
    }
}

#[test]
fn equal_texts_are_in_one_split_wherever_they_stand() {
    let folder = tempdir().unwrap();
    let mut reversed = texts();
    reversed.reverse();
    let first = write_texts(folder.path(), "first.parquet", &texts());
    let both = [
        first.clone(),
        write_texts(folder.path(), "second.parquet", &reversed),
    ];
    let open = |paths: &[std::path::PathBuf], seed| {
        let options = OpenOptions {
            validation_fraction: 0.2,
            seed,
            ..options(folder.path(), 32)
        };
        Dataset::open(paths, Tokenizer::byte_level(), options).unwrap()
    };
    let (once, twice) = (open(&[first], 1), open(&both, 2));
    let (one, two) = (&once.report().validation, &twice.report().validation);
    assert!(
        (8..=50).contains(&one.documents),
        "about a fifth of 120: {}",
        one.documents
    );
    assert_eq!(
        (2 * one.documents, 2 * one.bytes),
        (two.documents, two.bytes)
    );
    assert_eq!(twice.report().train.documents, 240 - two.documents);
}

#[test]
fn validation_rows_are_the_same_every_time_and_apart_from_training() {
    let dataset = open_texts(&texts(), 64, 0.1).unwrap();
    let rows: Vec<Row> = dataset.validation_rows().map(Result::unwrap).collect();
    let again: Vec<Row> = dataset.validation_rows().map(Result::unwrap).collect();
    assert_eq!(rows, again);
    assert_eq!(rows.len() as u64, dataset.report().validation.rows);
    // Texts begin with their own number, so a piece's first labels name its document.
    let starts = |rows: &[Row]| -> HashSet<Vec<i64>> {
        let piece = |row: &Row, start: i64| {
            row.labels[start as usize..]
                .iter()
                .copied()
                .take(6)
                .collect()
        };
        let starts = |row: &Row| -> Vec<Vec<i64>> {
            let pieces = &row.cu_seqlens[..row.cu_seqlens.len() - 1];
            pieces
                .iter()
                .map(|&start| piece(row, start))
                .filter(|p: &Vec<i64>| p[0] >= 48 && p[0] < 58)
                .collect()
        };
        rows.iter().flat_map(starts).collect()
    };
    let train: Vec<Row> = dataset
        .stream()
        .unwrap()
        .take(dataset.report().train.rows as usize)
        .map(Result::unwrap)
        .collect();
    assert!(!starts(&rows).is_empty());
    assert!(starts(&rows).is_disjoint(&starts(&train)));
}

#[test]
fn the_stream_does_not_depend_on_threads() {
    let rows = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            open_texts(&texts(), 64, 0.1)
                .unwrap()
                .stream()
                .unwrap()
                .take(80)
                .map(Result::unwrap)
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(rows(1), rows(5));
}

#[test]
fn nulls_and_empty_texts_are_counted() {
    let folder = tempdir().unwrap();
    let texts = [Some("abc"), None, Some(""), Some("de"), None];
    let texts: ArrayRef = Arc::new(StringArray::from_iter(texts));
    let shard = write(
        folder.path(),
        "s.parquet",
        vec![("text", texts)],
        WriterProperties::default(),
    );
    let options = OpenOptions {
        validation_fraction: 0.0,
        ..options(folder.path(), 7)
    };
    let dataset = Dataset::open(&[shard], Tokenizer::byte_level(), options).unwrap();
    let report = dataset.report();
    assert_eq!((report.rows, report.nulls, report.empties), (5, 2, 1));
    assert_eq!(
        (
            report.train.documents,
            report.train.labels,
            report.train.rows
        ),
        (2, 7, 1)
    );
    let shown = report.to_string();
    assert!(
        shown.starts_with("1 file, 5 rows, skipped: 2 null, 1 empty, 0 filtered"),
        "{shown}"
    );
    assert_eq!(dataset.validation_rows().count(), 0);
}

#[test]
fn too_little_text_says_which_split_and_what_to_change() {
    let small = open_texts(&["abc"], 5, 0.0).err().unwrap().to_string();
    assert!(small.contains("training documents (1, 4 tokens"), "{small}");
    let held_out = open_texts(&texts(), 5000, 0.01).err().unwrap();
    let is_validation = matches!(
        held_out,
        DatasetError::TooSmall {
            split: "validation",
            ..
        }
    );
    assert!(is_validation, "{held_out}");
    for (row_tokens, fraction) in [(0, 0.1), (8, 1.0), (8, -0.1), (8, f64::NAN)] {
        let error = open_texts(&texts(), row_tokens, fraction).err().unwrap();
        assert!(matches!(error, DatasetError::Option { .. }), "{error}");
    }
}

#[test]
fn other_data_or_settings_are_refused_by_name() {
    let dataset = open_texts(&texts(), 64, 0.1).unwrap();
    let saved = serde_json::to_string(dataset.identity()).unwrap();
    let saved = serde_json::from_str(&saved).unwrap();
    assert!(dataset.identity().check(&saved).is_ok());
    let refused = |other: Opened| other.identity().check(&saved).unwrap_err().to_string();
    let message = refused(open_texts(&texts(), 32, 0.1).unwrap());
    assert!(
        message.contains("row_tokens is 32, the run began with 64"),
        "{message}"
    );
    let message = refused(open_texts(&texts()[1..], 64, 0.1).unwrap());
    assert!(message.contains("the text of the data"), "{message}");
}
