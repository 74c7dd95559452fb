//! The report of a step that stands out: its numbers, what is usual, and the documents it learnt from.

use std::io::{self, Write};
use std::path::Path;

use datasets::Tokenizer;
use serde::{Serialize, Serializer};

use super::recent::Level;
use super::rows::KeptRow;
use crate::atomic::{WriteError, atomic_write_with};

/// Letters of all documents of a report together, and the most and fewest of one.
const TEXT: usize = 1 << 18;
const MOST: usize = 400;
const FEWEST: usize = 32;

/// A step that stands out.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub step: u64,
    /// Why: `not finite`, `loss`, `grad_norm`.
    pub reasons: &'a [&'static str],
    /// Of the loss.
    pub unit: &'static str,
    pub loss: Reading,
    pub grad_norm: Reading,
    pub lr: f64,
    /// Steps of which `median` and `deviation` are, and deviations from the median to the threshold.
    pub spike_window: usize,
    pub spike_factor: f64,
    /// Rows by micro-batch.
    pub micro_batches: Vec<Vec<RowReport>>,
}

/// A number of the step, and its level.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Reading {
    /// JSON has no NaN and no infinity; they are written as words.
    #[serde(serialize_with = "number_or_word")]
    pub value: f64,
    /// Not known in a run's first steps.
    pub usual: Option<Level>,
}

impl Reading {
    pub(super) fn is_jump(&self) -> bool {
        self.usual.is_some_and(|level| self.value > level.threshold)
    }
}

#[derive(Debug, Serialize)]
pub(super) struct RowReport {
    epoch: u64,
    row: u64,
    tokens: usize,
    padding: usize,
    documents: Vec<DocumentReport>,
}

/// A document, or the piece of one that is in the row.
#[derive(Debug, Serialize)]
struct DocumentReport {
    start: usize,
    end: usize,
    /// Whether the document ends here.
    ends: bool,
    /// Its text, or both ends of it.
    text: String,
}

impl Report<'_> {
    pub(super) fn write(&self, path: &Path) -> Result<(), WriteError> {
        atomic_write_with(path, |writer| {
            serde_json::to_writer_pretty(&mut *writer, self).map_err(io::Error::from)?;
            writer.write_all(b"\n")
        })
    }

    /// What stands out, in a line.
    pub(super) fn words(&self) -> String {
        let Self {
            step,
            loss,
            grad_norm,
            unit,
            ..
        } = self;
        if self.reasons.contains(&"not finite") {
            return format!(
                "step {step} was left out, at a loss of {:.3} {unit} and a gradient norm of {:.3}",
                loss.value, grad_norm.value
            );
        }
        let jump = |name: &str, reading: &Reading| {
            let Level { threshold, .. } = reading.usual.filter(|_| reading.is_jump())?;
            Some(format!(
                "the {name} jumped to {:.3}, beyond {threshold:.3}",
                reading.value
            ))
        };
        let jumps = [jump("loss", loss), jump("gradient norm", grad_norm)];
        let jumps: Vec<String> = jumps.into_iter().flatten().collect();
        format!("step {step}: {}", jumps.join(" and "))
    }
}

/// The rows of a step, with as much text as a report takes.
pub(super) fn rows(tokenizer: &Tokenizer, batch: &[Vec<KeptRow>]) -> Vec<Vec<RowReport>> {
    let rows = batch.iter().flatten();
    let documents: usize = rows.map(|row| row.bounds.len().saturating_sub(1)).sum();
    let letters = (TEXT / documents.max(1)).clamp(FEWEST, MOST);
    let document = |(start, end, labels): (usize, usize, &[u32])| {
        let text = labels.strip_suffix(&[tokenizer.eos()]);
        DocumentReport {
            start,
            end,
            ends: text.is_some(),
            text: excerpt(tokenizer, text.unwrap_or(labels), letters),
        }
    };
    let row = |kept: &KeptRow| RowReport {
        epoch: kept.epoch,
        row: kept.row,
        tokens: kept.tokens,
        padding: kept.padding,
        documents: kept.documents().map(document).collect(),
    };
    batch
        .iter()
        .map(|rows| rows.iter().map(row).collect())
        .collect()
}

/// The text of `ids`, or about `letters` letters of its two ends.
fn excerpt(tokenizer: &Tokenizer, ids: &[u32], letters: usize) -> String {
    let half = letters / 2;
    let decode = |ids: &[u32]| match tokenizer.decode(ids) {
        Ok(text) => text,
        Err(error) => error.to_string(),
    };
    // Hardly a token is less than a letter, so that as many tokens are enough.
    let (head, tail) = match ids.len() <= letters {
        true => (decode(ids), None),
        false => (decode(&ids[..half]), Some(decode(&ids[ids.len() - half..]))),
    };
    let whole = tail.is_none();
    let tail = tail.as_ref().unwrap_or(&head);
    if whole && head.chars().count() <= letters {
        return head;
    }
    let start: String = head.chars().take(half).collect();
    let skipped = tail.chars().count().saturating_sub(half);
    let end: String = tail.chars().skip(skipped).collect();
    format!("{start} ... {end}")
}

fn number_or_word<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    match value.is_finite() {
        true => serializer.serialize_f64(*value),
        false => serializer.serialize_str(&value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use datasets::{IGNORE, Position, Row};

    use super::*;

    fn ids(text: &str) -> impl Iterator<Item = i64> {
        text.bytes().map(i64::from)
    }

    #[test]
    fn rows_show_their_documents_and_no_padding() {
        let tokenizer = Tokenizer::byte_level();
        let (eos, pad) = (i64::from(tokenizer.eos()), i64::from(tokenizer.pad()));
        // "abc" with its end, the beginning of a longer document, two padded positions.
        let labels: Vec<i64> = ids("abc")
            .chain([eos])
            .chain(ids("de"))
            .chain([IGNORE; 2])
            .collect();
        let row = Row {
            tokens: vec![pad; 8],
            labels,
            positions: vec![0, 1, 2, 3, 0, 1, 0, 1],
            cu_seqlens: vec![0, 4, 6, 8],
            padding: 2,
            bytes: 5,
        };
        let kept = KeptRow::new(&row, Position { epoch: 2, row: 7 });
        let shown = serde_json::to_value(rows(&tokenizer, &[vec![kept]])).unwrap();
        let expected = serde_json::json!([[{
            "epoch": 2, "row": 6, "tokens": 8, "padding": 2,
            "documents": [
                {"start": 0, "end": 4, "ends": true, "text": "abc"},
                {"start": 4, "end": 6, "ends": false, "text": "de"},
            ],
        }]]);
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_long_text_is_shown_by_its_ends_and_many_texts_by_little_each() {
        let tokenizer = Tokenizer::byte_level();
        let text: Vec<u32> = (0..10_000).map(|i| 97 + i % 26).collect();
        let shown = excerpt(&tokenizer, &text, 10);
        assert_eq!(shown, "abcde ... lmnop");
        assert_eq!(excerpt(&tokenizer, &text[..10], 10), "abcdefghij");

        let row = |documents: usize| {
            KeptRow::new(
                &Row {
                    tokens: vec![0; 100 * documents],
                    labels: vec![97; 100 * documents],
                    positions: Vec::new(),
                    cu_seqlens: (0..=documents).map(|i| 100 * i as i64).collect(),
                    padding: 0,
                    bytes: 0,
                },
                Position::default(),
            )
        };
        let size = |documents| {
            let rows = rows(&tokenizer, &[vec![row(documents)]]);
            let texts = rows.iter().flatten().flat_map(|row| &row.documents);
            texts.map(|document| document.text.len()).sum::<usize>()
        };
        assert_eq!(size(100), 100 * 100);
        assert!(size(5_000) <= TEXT + 5 * 5_000);
    }
}
