//! The counts, for the terminal.

use std::fmt;

use crate::cache::Manifest;
use crate::corpus::CorpusShard;
use crate::pack::PackReport;
use crate::tokenizer::Tokenizer;

/// Everything that was read, packed and skipped.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct DatasetReport {
    /// Files read.
    pub sources: usize,
    /// Shards of the cache.
    pub shards: usize,
    /// Rows read; each is a document, a null or empty.
    pub rows: u64,
    /// Rows whose text is null; skipped.
    pub nulls: u64,
    /// Rows whose text has no letters at all; skipped.
    pub empties: u64,
    /// Rows that the filters left out.
    pub filtered: u64,
    /// The tokenizer's name.
    pub tokenizer: String,
    /// The tokenizer's number of ids.
    pub vocab_size: usize,
    /// T.
    pub row_tokens: usize,
    /// Training documents, packed as in epoch 0.
    pub train: PackReport,
    /// Documents held out.
    pub validation: PackReport,
}

impl DatasetReport {
    /// Without the rows, which are packed later.
    pub(crate) fn new(manifest: &Manifest, tokenizer: &Tokenizer, row_tokens: usize) -> Self {
        let counts = manifest.counts;
        Self {
            sources: manifest.sources.len(),
            shards: manifest.shards.len(),
            rows: counts.rows,
            nulls: counts.nulls,
            empties: counts.empties,
            filtered: counts.filtered,
            tokenizer: tokenizer.name().to_owned(),
            vocab_size: tokenizer.vocab_size(),
            row_tokens,
            train: PackReport::default(),
            validation: PackReport::default(),
        }
    }
}

impl fmt::Display for DatasetReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sources, rows) = (
            counted(self.sources as u64, "file"),
            counted(self.rows, "row"),
        );
        let [nulls, empties, filtered] = [self.nulls, self.empties, self.filtered].map(grouped);
        writeln!(
            f,
            "{sources}, {rows}, skipped: {nulls} null, {empties} empty, {filtered} filtered"
        )?;
        let vocab_size = grouped(self.vocab_size as u64);
        let row_tokens = grouped(self.row_tokens as u64);
        writeln!(
            f,
            "tokenizer {} ({vocab_size} ids), rows of {row_tokens} tokens",
            self.tokenizer
        )?;
        let columns = ["documents", "pieces", "rows", "tokens", "bytes", "padding"];
        write!(f, "{:10}", "")?;
        columns
            .iter()
            .try_for_each(|column| write!(f, " {column:>13}"))?;
        for (split, pack) in [("train", &self.train), ("validation", &self.validation)] {
            write!(f, "\n{split:10}")?;
            let counts = [
                pack.documents,
                pack.pieces,
                pack.rows,
                pack.tokens,
                pack.bytes,
            ];
            counts
                .iter()
                .try_for_each(|&count| write!(f, " {:>13}", grouped(count)))?;
            let padding = 100.0 * pack.padding_share();
            write!(f, " {:>13}", format!("{padding:.2} %"))?;
        }
        Ok(())
    }
}

impl fmt::Display for CorpusShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (summary, skipped) = (&self.summary, &self.summary.skipped);
        write!(
            f,
            "{} of {} from {}: {} Markdown, {} Rust\nskipped: {} too long, {} blank, {} not UTF-8, \
             {} repeated, {} beyond a package's share, {} beyond the budget\n{} {}",
            counted(summary.documents, "document"),
            megabytes(summary.bytes),
            counted(summary.packages, "package"),
            megabytes(summary.markdown_bytes),
            megabytes(summary.rust_bytes),
            grouped(skipped.too_long),
            grouped(skipped.blank),
            grouped(skipped.not_utf8),
            grouped(skipped.repeated),
            grouped(skipped.beyond_package),
            grouped(skipped.beyond_budget),
            if self.reused { "reused" } else { "written to" },
            self.path.display(),
        )
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

pub(crate) fn counted(count: u64, noun: &str) -> String {
    format!(
        "{} {noun}{}",
        grouped(count),
        if count == 1 { "" } else { "s" }
    )
}

/// Digits in groups of three.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{counted, grouped};

    #[test]
    fn digits_are_grouped_from_the_right() {
        let shown: Vec<_> = [0, 12, 999, 1000, 123_456, 1_234_567].map(grouped).into();
        assert_eq!(shown, ["0", "12", "999", "1,000", "123,456", "1,234,567"]);
        assert_eq!(counted(1, "row"), "1 row");
        assert_eq!(counted(2000, "row"), "2,000 rows");
    }
}
