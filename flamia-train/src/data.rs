//! The run's data: where it comes from, its validation rows, its counts.

use std::collections::BTreeMap;
use std::path::Path;

use datasets::tokenizer::SpecialIds;
use datasets::{
    CorpusError, Dataset, DatasetError, DatasetReport, OpenOptions, Packing, ProgressLine,
    Tokenizer, TokenizerError, corpus,
};
use tch::Device;

use crate::batch::MicroBatch;
use crate::error::TrainError;
use crate::settings::{self, Settings};

/// Where the built-in corpus is kept, beside what cargo builds.
const CORPUS_CACHE: &str = "target/corpus";

/// Why there is no data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The built-in corpus.
    #[error("cannot build the built-in corpus; --data takes Parquet files of your own")]
    Corpus(#[from] CorpusError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The shards, or a resumed run's position in them.
    #[error(transparent)]
    Dataset(#[from] DatasetError),
}

/// Opens the data that `settings` name; also a line about the corpus, if it is the built-in one.
///
/// # Errors
/// [`DataError`].
pub fn open(settings: &Settings) -> Result<(Dataset, Option<String>), DataError> {
    let from_file = |path| Tokenizer::from_file(path, SpecialIds::default());
    let tokenizer = settings.tokenizer.as_deref().map(from_file).transpose()?;
    let (path, corpus) = match &settings.data {
        Some(path) => (path.clone(), None),
        None => {
            let shard = corpus::build(Path::new("."), Path::new(CORPUS_CACHE))?;
            (shard.path.clone(), Some(shard.to_string()))
        }
    };
    let options = OpenOptions {
        seed: settings.seed,
        packing: match settings.batch.packing {
            settings::Packing::BestFit => Packing::BestFit,
            settings::Packing::Concat => Packing::Concat,
        },
        validation_fraction: settings.eval.fraction,
        ..OpenOptions::new(settings.batch.row_tokens)
    };
    let mut line = ProgressLine::new();
    let dataset = Dataset::open_with(&[path], tokenizer, options, &mut |progress| {
        line.show(progress);
    })?;
    line.finish();
    Ok((dataset, corpus))
}

/// `eval.rows` validation rows, evenly spread so that many documents are among them, in
/// micro-batches of `batch.rows`.
///
/// # Errors
/// [`TrainError`] if the rows cannot be read or laid out.
pub fn validation_batches(
    dataset: &Dataset,
    settings: &Settings,
    device: Device,
) -> Result<Vec<MicroBatch>, TrainError> {
    let rows = dataset.validation_sample(settings.eval.rows);
    rows.map_err(DataError::from)?
        .chunks(settings.batch.rows)
        .map(|rows| Ok(MicroBatch::new(rows, device)?))
        .collect()
}

/// The counts that a run's summary shows.
pub fn counts(report: &DatasetReport) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::from([
        ("rows of text".into(), report.rows),
        ("null texts skipped".into(), report.nulls),
        ("empty texts skipped".into(), report.empties),
        ("texts filtered out".into(), report.filtered),
    ]);
    for (split, pack) in [
        ("training", &report.train),
        ("validation", &report.validation),
    ] {
        for (name, count) in [
            ("documents", pack.documents),
            ("pieces", pack.pieces),
            ("packed rows", pack.rows),
            ("tokens", pack.tokens),
            ("padding", pack.padding),
        ] {
            counts.insert(format!("{split} {name}"), count);
        }
    }
    counts
}
