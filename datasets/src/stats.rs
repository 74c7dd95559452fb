//! How long a cache's documents are, and what each packing makes of them.

mod plot;

use std::fmt;

use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{CellAlignment, Table};
use rayon::prelude::*;
use serde::Serialize;

pub use plot::{PlotError, plot};

use crate::cache::{Cache, CacheError};
use crate::group::Document;
use crate::pack::{PackReport, Packer, Packing};
use crate::report::grouped;

/// Row lengths that models are trained on: 2k to 128k.
pub const ROW_LENGTHS: [usize; 7] = [2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// Shares of the documents whose lengths are told.
const QUANTILES: [f64; 7] = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99];

/// What a cache's documents are like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Their lengths.
    pub lengths: Lengths,
    /// For each row length, each packing.
    pub packed: Vec<Packed>,
}

/// Lengths in tokens, without BOS and EOS.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lengths {
    /// How many documents.
    pub documents: u64,
    /// All their tokens.
    pub tokens: u64,
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub deviation: f64,
    /// The shortest.
    pub shortest: u32,
    /// The longest.
    pub longest: u32,
    /// Shares of the documents, and the length that they do not exceed.
    pub quantiles: Vec<(f64, u32)>,
    /// Documents of length 2^(i/2) up to 2^((i+1)/2); the first has those of length 0 too.
    pub histogram: Vec<u64>,
}

/// What a packing makes of all documents in the cache's order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Packed {
    /// The policy.
    pub packing: Packing,
    /// T.
    pub row_tokens: usize,
    /// The counts.
    pub report: PackReport,
}

impl Stats {
    /// Counts a cache's documents and packs them into rows of each of these lengths, by their
    /// lengths alone. Needs four bytes of memory a document.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn of(cache: &Cache, row_lengths: &[usize]) -> Result<Self, CacheError> {
        let of_shard = |shard: usize| -> Result<Vec<u32>, CacheError> {
            let index = cache.index(shard)?;
            let documents = Document::all_of(index.get());
            Ok(documents.map(|(document, _)| document.labels).collect())
        };
        let shards: Result<Vec<_>, _> = (0..cache.manifest().shards.len())
            .into_par_iter()
            .map(of_shard)
            .collect();
        let labels = shards?.concat();
        let cases: Vec<(usize, Packing)> = row_lengths
            .iter()
            .flat_map(|&row_tokens| Packing::ALL.map(|packing| (row_tokens, packing)))
            .collect();
        let packed = cases
            .into_par_iter()
            .map(|(row_tokens, packing)| Packed::of(&labels, row_tokens, packing))
            .collect();
        Ok(Self {
            lengths: Lengths::of(labels.iter().map(|labels| labels - 1).collect()),
            packed,
        })
    }
}

impl Lengths {
    fn of(mut lengths: Vec<u32>) -> Self {
        lengths.sort_unstable();
        let documents = lengths.len() as u64;
        let tokens = lengths.iter().map(|&length| u64::from(length)).sum();
        let count = documents.max(1) as f64;
        let mean = tokens as f64 / count;
        let squares: f64 = lengths
            .iter()
            .map(|&length| (f64::from(length) - mean).powi(2))
            .sum();
        let at = |share: f64| {
            let place = (share * lengths.len() as f64).ceil() as usize;
            let length = lengths.get(place.saturating_sub(1)).copied();
            (share, length.unwrap_or_default())
        };
        let mut histogram = Vec::new();
        for &length in &lengths {
            let bucket = (2.0 * f64::from(length.max(1)).log2()).floor() as usize;
            histogram.resize(histogram.len().max(bucket + 1), 0);
            histogram[bucket] += 1;
        }
        Self {
            documents,
            tokens,
            mean,
            deviation: (squares / count).sqrt(),
            shortest: lengths.first().copied().unwrap_or_default(),
            longest: lengths.last().copied().unwrap_or_default(),
            quantiles: QUANTILES.map(at).into(),
            histogram,
        }
    }
}

impl Packed {
    fn of(labels: &[u32], row_tokens: usize, packing: Packing) -> Self {
        let documents = labels.iter().copied().enumerate();
        let mut report = PackReport::default();
        for pieces in Packer::new(documents, packing, row_tokens) {
            let tokens = |document: usize| (u64::from(labels[document]) - 1, 0);
            report.add(&pieces, row_tokens, tokens);
        }
        Self {
            packing,
            row_tokens,
            report,
        }
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lengths {
            documents,
            tokens,
            mean,
            deviation,
            shortest,
            longest,
            quantiles,
            ..
        } = &self.lengths;
        writeln!(
            f,
            "{} documents, {} tokens; mean {mean:.0}, standard deviation {deviation:.0}, \
             shortest {}, longest {}",
            grouped(*documents),
            grouped(*tokens),
            grouped((*shortest).into()),
            grouped((*longest).into()),
        )?;
        let shown = quantiles.iter().map(|(share, length)| {
            format!("{:.0} %: {}", 100.0 * share, grouped((*length).into()))
        });
        writeln!(f, "{}", shown.collect::<Vec<_>>().join("  "))?;
        let mut table = Table::new();
        table.load_style(UTF8_BORDERS_ONLY);
        table.set_header([
            "row tokens",
            "packing",
            "rows",
            "padding",
            "pieces",
            "pieces/row",
            "cuts",
        ]);
        for Packed {
            packing,
            row_tokens,
            report,
        } in &self.packed
        {
            let cuts = report.pieces - report.documents;
            let per_row = report.pieces as f64 / report.rows.max(1) as f64;
            table.add_row([
                grouped(*row_tokens as u64),
                packing.to_string(),
                grouped(report.rows),
                format!("{:.2} %", 100.0 * report.padding_share()),
                grouped(report.pieces),
                format!("{per_row:.1}"),
                grouped(cuts),
            ]);
        }
        for column in [0, 2, 3, 4, 5, 6] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        write!(f, "{table}")
    }
}
