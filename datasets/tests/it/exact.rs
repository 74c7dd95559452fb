//! Every token exactly once per epoch, for any number of ranks and threads, with stops between.
//!
//! No two tokens of a dataset here are the same, so a slip of any kind shows.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use datasets::{
    Dataset, IGNORE, OpenOptions, Packing, Position, Row, Share, Shuffle, SpecialIds, Tokenizer,
};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

use crate::fixtures::{options, word_level, write_json};
use crate::interop::write_bin;

const VOCABULARY: u32 = 12_000;
const EOS: i64 = 1;

/// A tokenizer whose ids are 0 for BOS, 1 for EOS, and plenty.
fn tokenizer() -> Tokenizer {
    static FILE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = FILE.get_or_init(|| {
        let folder = tempdir().unwrap();
        let words: Vec<String> = ["<s>", "</s>"]
            .map(String::from)
            .into_iter()
            .chain((2..VOCABULARY).map(|id| format!("w{id}")))
            .collect();
        let json = word_level(&words, &[("<s>", 0, true), ("</s>", 1, true)]);
        let path = write_json(folder.path(), &json);
        (folder, path)
    });
    Tokenizer::from_file(path, SpecialIds::default()).unwrap()
}

/// Documents of these lengths whose tokens are 2, 3, 4 ...
fn dataset(folder: &Path, lengths: &[u32], change: impl FnOnce(&mut OpenOptions)) -> Dataset {
    let mut next = 2;
    let mut ids = Vec::new();
    for &length in lengths {
        ids.push(0);
        ids.extend(next..next + length);
        next += length;
    }
    assert!(next <= VOCABULARY);
    let path = folder.join("unique.bin");
    write_bin(&path, 20_240_520, 1, &ids);
    let mut options = OpenOptions {
        validation_fraction: 0.0,
        ..options(folder, 64)
    };
    change(&mut options);
    Dataset::open(&[path], tokenizer(), options).unwrap()
}

/// Labels of all rows but padding, sorted.
fn labels<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Vec<i64> {
    let labels = rows.into_iter().flat_map(|row| row.labels.iter().copied());
    let mut labels: Vec<i64> = labels.filter(|&label| label != IGNORE).collect();
    labels.sort_unstable();
    labels
}

/// One EOS a document, then every token.
fn all_labels(lengths: &[u32]) -> Vec<i64> {
    let tokens: u32 = lengths.iter().sum();
    let eos = lengths.iter().map(|_| EOS);
    eos.chain((0..i64::from(tokens)).map(|token| token + 2))
        .collect()
}

fn lengths() -> impl Strategy<Value = Vec<u32>> {
    let length = prop_oneof![1u32..12, 1u32..90, 150u32..400];
    prop::collection::vec(length, 8..30)
}

fn shuffles() -> impl Strategy<Value = Shuffle> {
    (20u32..300, 1u32..6).prop_map(|(block_tokens, blocks)| Shuffle {
        block_tokens,
        blocks,
    })
}

fn packings() -> impl Strategy<Value = Packing> {
    prop::sample::select(&Packing::ALL[..])
}

fn take(dataset: &Dataset, position: Position, share: Share, rows: usize) -> (Vec<Row>, Position) {
    let mut stream = dataset.stream_of(position, share).unwrap();
    let rows = stream.by_ref().take(rows).map(Result::unwrap).collect();
    (rows, stream.position())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn an_epoch_gives_every_token_once_to_one_rank(
        lengths in lengths(),
        shuffle in shuffles(),
        packing in packings(),
        row_tokens in 1usize..100,
        epoch in 0u64..3,
    ) {
        let folder = tempdir().unwrap();
        prop_assume!(all_labels(&lengths).len() >= row_tokens);
        let dataset = dataset(folder.path(), &lengths, |options| {
            (options.shuffle, options.packing, options.row_tokens) = (shuffle, packing, row_tokens);
        });
        for ranks in 1..=7 {
            let shares: Vec<Vec<Row>> = (0..ranks)
                .map(|rank| {
                    let rows = dataset.epoch_rows(epoch, Share { rank, ranks }).unwrap();
                    rows.map(Result::unwrap).collect()
                })
                .collect();
            prop_assert_eq!(labels(shares.iter().flatten()), all_labels(&lengths));
            let steps: Vec<usize> = shares.iter().map(Vec::len).collect();
            prop_assert!(steps.iter().all(|&count| count == steps[0]), "{:?}", steps);
            // Only to make up the last step is there a row without any label.
            let blank = shares.iter().flatten().filter(|row| row.label_count() == 0).count();
            prop_assert!(blank < ranks, "{} of {} ranks", blank, ranks);
            prop_assert!(shares.iter().flatten().all(|row| row.tokens.len() == row_tokens));
        }
    }

    /// Runs of changing numbers of ranks, each stopped after some steps, give the rows of the
    /// stream that was never stopped, in its order, over two epochs.
    #[test]
    fn stops_and_other_rank_counts_change_nothing(
        lengths in lengths(),
        shuffle in shuffles(),
        packing in packings(),
        runs in prop::collection::vec((1usize..=7, 0usize..9), 1..12),
    ) {
        let folder = tempdir().unwrap();
        let dataset = dataset(folder.path(), &lengths, |options| {
            (options.shuffle, options.packing) = (shuffle, packing);
        });
        let total: usize = runs.iter().map(|(ranks, steps)| ranks * steps).sum();
        let (expected, end) = take(&dataset, Position::default(), Share::default(), total);
        let mut position = Position::default();
        let mut given = Vec::new();
        for (ranks, steps) in runs {
            let taken: Vec<_> = (0..ranks)
                .map(|rank| take(&dataset, position, Share { rank, ranks }, steps))
                .collect();
            for step in 0..steps {
                given.extend(taken.iter().map(|(rows, _)| rows[step].clone()));
            }
            // All ranks say the same, so any of them may save it.
            prop_assert!(taken.iter().all(|(_, after)| *after == taken[0].1));
            let saved = serde_json::to_string(&taken[0].1).unwrap();
            position = serde_json::from_str(&saved).unwrap();
        }
        prop_assert_eq!(given, expected);
        prop_assert_eq!(position, end);
    }

    #[test]
    fn threads_change_nothing(
        lengths in lengths(),
        shuffle in shuffles(),
        packing in packings(),
        threads in 1usize..5,
        ahead in 1usize..4,
        ranks in 1usize..4,
        start in 0u64..5,
    ) {
        let folder = tempdir().unwrap();
        let dataset = dataset(folder.path(), &lengths, |options| {
            (options.shuffle, options.packing) = (shuffle, packing);
        });
        let rows = dataset.report().train.rows;
        let position = Position { epoch: 0, row: start.min(rows) };
        let share = Share { rank: ranks - 1, ranks };
        let stream = || dataset.stream_of(position, share).unwrap();
        let mut prefetched = stream().prefetch(threads, ahead).unwrap();
        let mut plain = stream();
        for _ in 0..2 * rows {
            prop_assert_eq!(prefetched.next().unwrap().unwrap(), plain.next().unwrap().unwrap());
            prop_assert_eq!(prefetched.position(), plain.position());
        }
    }
}

/// Neighbours in the cache should be strangers in the stream, however many groups there are.
#[test]
fn the_shuffle_mixes_blocks_from_all_over() {
    let folder = tempdir().unwrap();
    let lengths = [10; 1000];
    let dataset = dataset(folder.path(), &lengths, |options| {
        options.shuffle = Shuffle {
            block_tokens: 110,
            blocks: 10,
        };
        options.row_tokens = 55;
    });
    let rows: Vec<Row> = dataset
        .epoch_rows(0, Share::default())
        .unwrap()
        .map(Result::unwrap)
        .collect();
    // A document's number by its first token.
    let documents: Vec<i64> = rows
        .iter()
        .flat_map(|row| row.labels.iter().filter(|&&label| label > EOS))
        .filter(|&&label| (label - 2) % 10 == 0)
        .map(|label| (label - 2) / 10)
        .collect();
    assert_eq!(documents.len(), 1000);
    let neighbours = documents
        .windows(2)
        .filter(|pair| (pair[0] - pair[1]).abs() < 10);
    // Of 999 pairs, 1 in 10 lies in one block by chance; unshuffled, all would.
    let near = neighbours.count();
    assert!((20..250).contains(&near), "{near}");
    // The first tenth of the stream comes from ten blocks out of a hundred, not from one place.
    let first: Vec<i64> = documents[..100]
        .iter()
        .map(|document| document / 100)
        .collect();
    let places = (0..10).filter(|place| first.contains(place)).count();
    assert!(places >= 4, "{places}");
}

#[test]
fn a_rank_beyond_the_ranks_is_refused() {
    let folder = tempdir().unwrap();
    let dataset = dataset(folder.path(), &[100; 4], |_| {});
    let share = Share { rank: 2, ranks: 2 };
    let error = dataset.stream_of(Position::default(), share).err().unwrap();
    assert!(error.to_string().contains("rank = 2 of 2"), "{error}");
    assert!(dataset.epoch_rows(0, Share { rank: 0, ranks: 0 }).is_err());
}

#[test]
fn concat_pads_only_where_documents_end_for_good() {
    let folder = tempdir().unwrap();
    let lengths: Vec<u32> = (0..100).map(|n| 1 + n * 7 % 61).collect();
    let dataset = dataset(folder.path(), &lengths, |options| {
        options.packing = Packing::Concat;
    });
    let report = &dataset.report().train;
    assert!(report.padding < 64, "{report:?}");
    assert_eq!(report.rows, report.labels.div_ceil(64));
    let rows: Vec<Row> = dataset.packed_rows(0).map(Result::unwrap).collect();
    let padded = rows.iter().filter(|row| row.padding > 0).count();
    assert!(padded <= 1, "only the last row");
}
