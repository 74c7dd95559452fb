//! What can be asked of `cargo xtask data`.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use datasets::stats::ROW_LENGTHS;
use datasets::{Cache, Columns, Filters, Packing, PrepareOptions, Selection, Shuffle};

/// Prepare token caches of documents, and look into them.
#[derive(Parser)]
#[command(name = "data", bin_name = "cargo xtask data")]
pub struct Cli {
    #[command(subcommand)]
    pub task: Task,
}

#[derive(Subcommand)]
pub enum Task {
    /// Tokenise documents into a cache; go on where an earlier call stopped
    Prepare(Box<PrepareArgs>),
    /// Tell and plot how long documents are, and how they pack
    Stats(StatsArgs),
    /// Read every shard to its end and compare it with the manifest
    Check {
        /// The cache's folder
        cache: PathBuf,
    },
    /// Print a training row with its documents
    Show(ShowArgs),
}

#[derive(Args)]
pub struct PrepareArgs {
    /// Parquet, JSON lines (.jsonl, also .gz or .zst) or llm.c's .bin: files, folders, patterns,
    /// or hf://OWNER/NAME[@REVISION][/PATH]
    #[arg(long, required = true, num_args = 1.., value_name = "SOURCE")]
    pub data: Vec<PathBuf>,
    /// A tokenizer.json; without it, each byte is a token
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// The cache's folder
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// The id that begins documents, where the tokenizer does not tell
    #[arg(long, value_name = "ID")]
    pub bos: Option<u32>,
    /// The id that ends documents, where the tokenizer does not tell
    #[arg(long, value_name = "ID")]
    pub eos: Option<u32>,
    /// Tokens of a shard
    #[arg(long, value_name = "N", default_value_t = 100_000_000)]
    pub shard_tokens: u64,
    /// Make the cache anew, whatever the folder holds
    #[arg(long)]
    pub rebuild: bool,
    /// Leave out documents of a lower score
    #[arg(long, value_name = "SCORE")]
    pub min_score: Option<f64>,
    /// Leave out documents of a lower language score
    #[arg(long, value_name = "SCORE")]
    pub min_language_score: Option<f64>,
    /// Leave out documents of fewer tokens, as the source counts them
    #[arg(long, value_name = "N")]
    pub min_token_count: Option<u64>,
    /// Leave out documents of more tokens, as the source counts them
    #[arg(long, value_name = "N")]
    pub max_token_count: Option<u64>,
    /// Take the documents of these crawls only
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub dump: Vec<String>,
    #[command(flatten)]
    columns: ColumnArgs,
}

/// Names of columns in Parquet, and of keys in JSON.
#[derive(Args)]
struct ColumnArgs {
    /// The column of the texts
    #[arg(long, value_name = "COLUMN", default_value = "text")]
    text_column: String,
    /// The column that --min-score looks at
    #[arg(long, value_name = "COLUMN", default_value = "score")]
    score_column: String,
    /// The column that --min-language-score looks at
    #[arg(long, value_name = "COLUMN", default_value = "language_score")]
    language_score_column: String,
    /// The column that --min-token-count and --max-token-count look at
    #[arg(long, value_name = "COLUMN", default_value = "token_count")]
    token_count_column: String,
    /// The column that --dump looks at
    #[arg(long, value_name = "COLUMN", default_value = "dump")]
    dump_column: String,
}

impl PrepareArgs {
    pub fn options(&self) -> PrepareOptions {
        let columns = &self.columns;
        PrepareOptions {
            selection: Selection {
                columns: Columns {
                    text: columns.text_column.clone(),
                    score: columns.score_column.clone(),
                    language_score: columns.language_score_column.clone(),
                    token_count: columns.token_count_column.clone(),
                    dump: columns.dump_column.clone(),
                    ..Columns::default()
                },
                filters: Filters {
                    min_score: self.min_score,
                    min_language_score: self.min_language_score,
                    min_token_count: self.min_token_count,
                    max_token_count: self.max_token_count,
                    dumps: self.dump.clone(),
                },
            },
            shard_tokens: self.shard_tokens,
            rebuild: self.rebuild,
            ..PrepareOptions::default()
        }
    }
}

#[derive(Args)]
pub struct StatsArgs {
    /// The cache's folder
    pub cache: PathBuf,
    /// Row lengths to pack for; 2k to 128k if none is given
    #[arg(long, value_delimiter = ',', value_name = "T", value_parser = clap::value_parser!(u32).range(1..))]
    row_tokens: Vec<u32>,
    /// Draw them into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

impl StatsArgs {
    pub fn row_lengths(&self) -> Vec<usize> {
        if self.row_tokens.is_empty() {
            return ROW_LENGTHS.into();
        }
        self.row_tokens
            .iter()
            .map(|&tokens| tokens as usize)
            .collect()
    }
}

#[derive(Args)]
pub struct ShowArgs {
    /// The cache's folder
    pub cache: PathBuf,
    /// The row, counted from 0 in the order of training
    pub row: u64,
    /// The epoch
    #[arg(long, default_value_t = 0)]
    pub epoch: u64,
    /// Tokens of a row
    #[arg(long, value_name = "T", default_value_t = 4096)]
    pub row_tokens: usize,
    /// Seed of the shuffles
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Share of the documents held out
    #[arg(long, value_name = "SHARE", default_value_t = 0.05)]
    pub validation_fraction: f64,
    /// concat or best-fit
    #[arg(long, default_value_t = Packing::default())]
    pub packing: Packing,
    /// Tokens of a block of the shuffle
    #[arg(long, value_name = "N", default_value_t = Shuffle::default().block_tokens)]
    pub block_tokens: u32,
    /// Blocks that the shuffle mixes
    #[arg(long, value_name = "N", default_value_t = Shuffle::default().blocks)]
    pub blocks: u32,
    /// Print texts in full
    #[arg(long)]
    pub full: bool,
}

/// A cache in a few lines.
pub struct Described<'a>(pub &'a Cache);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let manifest = self.0.manifest();
        let counts = manifest.counts;
        writeln!(
            f,
            "{}: {} documents, {} tokens, {:.1} MB of text in {} shards",
            self.0.dir().display(),
            manifest.documents(),
            manifest.tokens() - manifest.documents(),
            manifest.text_bytes() as f64 / 1e6,
            manifest.shards.len(),
        )?;
        write!(
            f,
            "{} records of {} files; skipped {} null, {} empty, {} filtered; tokenizer {}",
            counts.rows,
            manifest.sources.len(),
            counts.nulls,
            counts.empties,
            counts.filtered,
            manifest.tokenizer.name,
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn filters_and_columns_reach_the_options() {
        let line = "data prepare --data a b* --out c --min-score 3 --dump x y --text-column body";
        let Task::Prepare(args) = Cli::try_parse_from(line.split(' ')).unwrap().task else {
            panic!("not parsed as prepare");
        };
        let Selection { columns, filters } = args.options().selection;
        assert_eq!(args.data, ["a", "b*"].map(PathBuf::from));
        assert_eq!(columns.text, "body");
        assert_eq!(
            (filters.min_score, filters.dumps),
            (Some(3.0), vec!["x".into(), "y".into()])
        );
    }
}
