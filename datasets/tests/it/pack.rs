//! Properties of packed rows over random documents and row lengths. The oracle is the documents'
//! own bytes: each letter is a token, so rows can be unpacked into texts again.

use std::collections::HashMap;

use datasets::{IGNORE, Row};
use proptest::prelude::*;

use crate::fixtures::open_texts;

const BOS: i64 = 256;
const EOS: i64 = 257;
const PAD: i64 = 258;

/// The labels of each piece, padding left out, after checking everything a row promises.
fn pieces(row: &Row, row_tokens: usize) -> Vec<Vec<i64>> {
    let Row {
        tokens,
        labels,
        positions,
        cu_seqlens,
        padding,
        bytes,
    } = row;
    assert_eq!(
        [tokens.len(), labels.len(), positions.len()],
        [row_tokens; 3]
    );
    assert_eq!(
        (cu_seqlens[0], *cu_seqlens.last().unwrap()),
        (0, row_tokens as i64)
    );
    assert!(cu_seqlens.is_sorted_by(|a, b| a < b), "{cu_seqlens:?}");
    let mut found = Vec::new();
    let mut padded = 0;
    for bounds in cu_seqlens.windows(2) {
        let span = bounds[0] as usize..bounds[1] as usize;
        let (inputs, targets) = (&tokens[span.clone()], &labels[span.clone()]);
        assert_eq!(
            positions[span.clone()],
            (0..span.len() as i64).collect::<Vec<_>>()
        );
        if targets[0] == IGNORE {
            padded += span.len();
            assert_eq!(span.end, row_tokens, "padding only at the end");
            assert!(inputs.iter().all(|&id| id == PAD) && targets.iter().all(|&id| id == IGNORE));
        } else {
            assert_eq!(inputs[0], BOS);
            assert_eq!(
                inputs[1..],
                targets[..targets.len() - 1],
                "labels are the next inputs"
            );
            assert!(!inputs.contains(&EOS) && !targets.contains(&IGNORE));
            found.push(targets.to_vec());
        }
    }
    assert_eq!(*padding, padded);
    assert_eq!(row.label_count(), row_tokens - padded);
    let text_labels = found.iter().flatten().filter(|&&id| id < 256).count();
    assert_eq!(*bytes, text_labels as u64);
    found
}

/// Joins pieces to texts: a piece that does not end in EOS goes on in the next row's first piece.
fn unpack(rows: &[Row], row_tokens: usize) -> Vec<String> {
    let (mut texts, mut open) = (Vec::new(), Vec::new());
    for row in rows {
        let pieces = pieces(row, row_tokens);
        let last = pieces.len() - 1;
        for (index, mut labels) in pieces.into_iter().enumerate() {
            let ends = labels.last() == Some(&EOS);
            assert!(ends || index == last, "only a row's last piece goes on");
            if index == 0 {
                labels = [std::mem::take(&mut open), labels].concat();
            }
            if ends {
                labels.pop();
                let bytes = labels.into_iter().map(|id| u8::try_from(id).unwrap());
                texts.push(String::from_utf8(bytes.collect()).unwrap());
            } else {
                open = labels;
            }
        }
    }
    assert!(open.is_empty(), "the last document ends");
    texts
}

fn counts(texts: impl IntoIterator<Item = String>) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    texts
        .into_iter()
        .for_each(|text| *counts.entry(text).or_default() += 1);
    counts
}

/// Distinct texts of these lengths.
fn texts(lengths: &[usize]) -> Vec<String> {
    let letter =
        |document: usize, index: usize| (b'a' + ((document * 7 + index) % 26) as u8) as char;
    let text = |(document, &len): (usize, &usize)| {
        format!("{document}:")
            .chars()
            .chain((0..).map(|index| letter(document, index)))
            .take(len)
            .collect()
    };
    lengths.iter().enumerate().map(text).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_label_stands_once_in_order(
        lengths in prop::collection::vec(prop_oneof![1usize..12, 1usize..90, 200usize..900], 1..60),
        row_tokens in 1usize..300,
    ) {
        let texts = texts(&lengths);
        let labels: usize = lengths.iter().map(|len| len + 1).sum();
        prop_assume!(labels >= row_tokens);
        let dataset = open_texts(&texts, row_tokens, 0.0).unwrap();
        let report = dataset.report().train.clone();
        let rows: Vec<Row> = dataset.packed_rows(0).map(Result::unwrap).collect();
        prop_assert_eq!(rows.len() as u64, report.rows);
        prop_assert_eq!(counts(unpack(&rows, row_tokens)), counts(texts.clone()));

        let all: Vec<Vec<i64>> = rows.iter().flat_map(|row| pieces(row, row_tokens)).collect();
        let bytes: u64 = lengths.iter().map(|&len| len as u64).sum();
        prop_assert_eq!(report.documents, texts.len() as u64);
        prop_assert_eq!((report.tokens, report.bytes), (bytes, bytes));
        prop_assert_eq!(rows.iter().map(|row| row.bytes).sum::<u64>(), bytes);
        prop_assert_eq!(report.pieces, all.len() as u64);
        prop_assert_eq!(report.labels, labels as u64);
        prop_assert_eq!(report.labels + report.padding, report.rows * row_tokens as u64);
    }

    #[test]
    fn documents_that_fit_are_whole(
        lengths in prop::collection::vec(1usize..400, 1..80),
        row_tokens in 2usize..300,
    ) {
        let texts = texts(&lengths);
        prop_assume!(lengths.iter().map(|len| len + 1).sum::<usize>() >= row_tokens);
        let dataset = open_texts(&texts, row_tokens, 0.0).unwrap();
        let rows = dataset.packed_rows(0).map(Result::unwrap);
        let all: Vec<Vec<i64>> = rows.flat_map(|row| pieces(&row, row_tokens)).collect();
        for text in texts.iter().filter(|text| text.len() < row_tokens) {
            let whole: Vec<i64> = text.bytes().map(i64::from).chain([EOS]).collect();
            prop_assert!(all.contains(&whole), "{} was cut", text);
        }
    }
}

#[test]
fn a_long_document_goes_on_in_the_next_row() {
    let dataset = open_texts(&["abcdefghij"], 4, 0.0).unwrap();
    let rows: Vec<Row> = dataset.packed_rows(0).map(Result::unwrap).collect();
    let [a, j] = [i64::from(b'a'), i64::from(b'j')];
    assert_eq!(rows[0].tokens, [BOS, a, a + 1, a + 2]);
    assert_eq!(rows[0].labels, [a, a + 1, a + 2, a + 3]);
    assert_eq!(rows[1].tokens, [BOS, a + 4, a + 5, a + 6]);
    assert_eq!(rows[1].labels, [a + 4, a + 5, a + 6, a + 7]);
    assert_eq!(rows[2].tokens, [BOS, j - 1, j, PAD]);
    assert_eq!(rows[2].labels, [j - 1, j, EOS, IGNORE]);
    assert_eq!(rows[2].positions, [0, 1, 2, 0]);
    assert_eq!(rows[2].cu_seqlens, [0, 3, 4]);
    assert_eq!(
        rows.iter().map(|row| row.bytes).collect::<Vec<_>>(),
        [4, 4, 2]
    );
}

#[test]
fn short_documents_leave_little_padding() {
    let lengths: Vec<usize> = (0..3000).map(|index| 10 + (index * 7919) % 190).collect();
    let report = open_texts(&texts(&lengths), 256, 0.0)
        .unwrap()
        .report()
        .train
        .clone();
    assert_eq!(report.pieces, report.documents, "none is cut");
    assert!(report.padding * 50 < report.labels, "under 2 %: {report:?}");
}

#[test]
fn long_documents_fill_the_ends_of_rows() {
    let report = open_texts(&texts(&[900; 200]), 256, 0.0)
        .unwrap()
        .report()
        .train
        .clone();
    assert!(report.padding * 20 < report.labels, "under 5 %: {report:?}");
}
