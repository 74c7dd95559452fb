//! `sched simulate --ranks`: the rows of global batches shared among ranks.

use std::num::NonZero;

use flamia_probe::report::version;
use flamia_sched::ranks::{Balance, StepTime, share};
use flamia_sched::{Documents, Mask};
use serde::Serialize;

use super::SchedError;
use super::policy::time;
use super::source::{Distribution, Source};

/// Ranks that share the rows of each step.
#[derive(Clone, Debug, clap::Args)]
pub struct Batch {
    /// Share rows among N data-parallel ranks, instead of items among SMs
    #[arg(
        long,
        value_name = "N",
        conflicts_with_all = [
            "workloads", "policies", "svg", "sms", "pass", "cost", "heads", "kv_heads",
            "heads_per_section", "l2_mib", "item_rows", "per_block_us", "per_item_us", "latency",
            "lead",
        ]
    )]
    pub ranks: Option<NonZero<usize>>,

    /// Rows that every rank takes in a step
    #[arg(long, value_name = "K", default_value = "4", requires = "ranks")]
    pub rows_per_rank: NonZero<usize>,

    /// Tokens of a packed row; documents are cut where it ends
    #[arg(long, value_name = "T", default_value = "16384", requires = "ranks")]
    pub row_tokens: NonZero<usize>,

    /// Time of a token in all but attention [default: a Llama of 1.24 billion parameters on an H200]
    #[arg(long, value_name = "US", requires = "ranks", value_parser = time)]
    pub per_token_us: Option<f64>,

    /// Time of a visited pair of a query and a key tile in all heads and layers [default: the same]
    #[arg(long, value_name = "US", requires = "ranks", value_parser = time)]
    pub per_pair_us: Option<f64>,
}

/// One rank in one step under one policy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankRow {
    /// A file or a distribution.
    pub documents: String,
    /// `causal`, `full` or `window:KEYS`.
    pub mask: String,
    /// Tokens of a row.
    pub row_tokens: usize,
    /// Ranks of the global batch.
    pub ranks: usize,
    /// Rows each of them takes.
    pub rows_per_rank: usize,
    /// Time of a token in all but attention.
    pub per_token_us: f64,
    /// Time of a visited pair of tiles.
    pub per_pair_us: f64,
    /// How rows came to ranks.
    pub policy: &'static str,
    /// Which global batch, counted from 0.
    pub step: usize,
    /// Which rank, counted from 0.
    pub rank: usize,
    /// Its rows, counted from the first of all steps.
    pub rows: Vec<usize>,
    /// How long it takes for them.
    pub time_ms: f64,
    /// This package's version and commit.
    pub version: String,
}

/// All steps under one policy. Times are means over steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    documents: String,
    mask: String,
    row_tokens: usize,
    ranks: usize,
    rows_per_rank: usize,
    steps: usize,
    policy: &'static str,
    slowest_ms: f64,
    mean_ms: f64,
    /// The slowest rank's time as a multiple of the mean one's.
    ratio: f64,
    /// The same in the step where it is worst.
    worst_ratio: f64,
    /// Share of the ranks' time spent waiting for the slowest.
    waiting_percent: f64,
}

impl Batch {
    /// A row for each policy, step and one of `ranks`. Documents that fill no whole step are left
    /// out.
    ///
    /// # Errors
    /// Documents that cannot be had or do not fill a step.
    pub fn rows(
        &self,
        ranks: NonZero<usize>,
        source: &Source,
        mask: Mask,
    ) -> Result<Vec<RankRow>, SchedError> {
        let rows_per_rank = self.rows_per_rank.get();
        let per_step = ranks.get() * rows_per_rank;
        let row_tokens = self.row_tokens.get();
        let mut source = source.clone();
        if source.lengths.is_none() {
            source
                .distribution
                .get_or_insert(Distribution::LogUniform(128, 8192));
            source.total.get_or_insert(per_step * row_tokens);
        }
        let model = self.model();
        let mut rows = Vec::new();
        for lengths in source.read()? {
            let packed = pack(&lengths.lengths, row_tokens)?;
            if packed.len() < per_step {
                return Err(SchedError::TooFewRows {
                    found: packed.len(),
                    row_tokens,
                    ranks: ranks.get(),
                    rows_per_rank,
                });
            }
            let times: Vec<_> = packed.iter().map(|row| model.of(row, mask)).collect();
            for (policy, balance) in POLICIES {
                for (step, times) in times.chunks_exact(per_step).enumerate() {
                    let shares = share(times, ranks, balance)
                        .expect("a step has as many rows for each rank");
                    for (rank, (own, load)) in shares.rows.iter().zip(&shares.loads).enumerate() {
                        rows.push(RankRow {
                            documents: lengths.name.clone(),
                            mask: mask.to_string(),
                            row_tokens,
                            ranks: ranks.get(),
                            rows_per_rank,
                            per_token_us: model.per_token,
                            per_pair_us: model.per_block,
                            policy,
                            step,
                            rank,
                            rows: own.iter().map(|row| step * per_step + row).collect(),
                            time_ms: load / 1e3,
                            version: version(),
                        });
                    }
                }
            }
        }
        Ok(rows)
    }

    fn model(&self) -> StepTime {
        let named = StepTime::LLAMA_1B_H200;
        StepTime {
            per_token: self.per_token_us.unwrap_or(named.per_token),
            per_block: self.per_pair_us.unwrap_or(named.per_block),
        }
    }
}

const POLICIES: [(&str, Balance); 4] = [
    ("as-they-come", Balance::AsTheyCome),
    ("snake", Balance::Snake),
    ("greedy", Balance::Greedy),
    ("refined", Balance::Refined),
];

/// Full rows of documents one after another, cut where a row ends.
fn pack(lengths: &[usize], row_tokens: usize) -> Result<Vec<Documents>, SchedError> {
    let mut rows = Vec::new();
    let (mut row, mut room) = (Vec::new(), row_tokens);
    for &length in lengths {
        let mut left = length;
        while left >= room {
            row.push(room);
            left -= room;
            rows.push(Documents::from_lengths(&row)?);
            (row, room) = (Vec::new(), row_tokens);
        }
        if left > 0 {
            row.push(left);
            room -= left;
        }
    }
    Ok(rows)
}

/// One line for each policy.
pub fn summary(rows: &[RankRow]) -> Vec<Summary> {
    rows.chunk_by(|a, b| a.policy == b.policy)
        .map(|of_policy| {
            let steps: Vec<(f64, f64)> = of_policy
                .chunk_by(|a, b| a.step == b.step)
                .map(|step| {
                    let times = step.iter().map(|row| row.time_ms);
                    (
                        times.clone().fold(0.0, f64::max),
                        times.sum::<f64>() / step.len() as f64,
                    )
                })
                .collect();
            let mean_of = |part: fn(&(f64, f64)) -> f64| {
                steps.iter().map(part).sum::<f64>() / steps.len() as f64
            };
            let (slowest_ms, mean_ms) = (mean_of(|step| step.0), mean_of(|step| step.1));
            let ratios = steps.iter().map(|(slowest, mean)| slowest / mean);
            let first = &of_policy[0];
            Summary {
                documents: first.documents.clone(),
                mask: first.mask.clone(),
                row_tokens: first.row_tokens,
                ranks: first.ranks,
                rows_per_rank: first.rows_per_rank,
                steps: steps.len(),
                policy: first.policy,
                slowest_ms,
                mean_ms,
                ratio: slowest_ms / mean_ms,
                worst_ratio: ratios.fold(1.0, f64::max),
                waiting_percent: 100.0 * (1.0 - mean_ms / slowest_ms),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::parsed;
    use super::*;

    fn rows(line: &str) -> Result<Vec<RankRow>, SchedError> {
        let settings = parsed(line);
        let ranks = settings.batch.ranks.unwrap();
        settings.batch.rows(ranks, &settings.source, settings.mask)
    }

    #[test]
    fn documents_are_cut_where_rows_end() {
        let packed = pack(&[3, 0, 9, 1, 3, 2], 5).unwrap();
        let boundaries: Vec<_> = packed.iter().map(Documents::cu_seqlens).collect();
        assert_eq!(boundaries, [&[0, 3, 5][..], &[0, 5], &[0, 2, 3, 5]]);
        assert!(pack(&[4], 5).unwrap().is_empty());
        assert_eq!(pack(&[5], 5).unwrap().len(), 1);
    }

    /// Four rows of 1024 tokens, of 36 tile pairs as one document and of 8 as eight.
    #[test]
    fn long_and_short_rows_go_together() {
        let rows = rows(
            "--ranks 2 --rows-per-rank 2 --row-tokens 1024 --per-token-us 0 --per-pair-us 1000 \
             --distribution fixed:1024,8x128,1024,8x128",
        )
        .unwrap();
        assert_eq!(rows.len(), 4 * 2);
        let times = |policy: &str| {
            let of_policy = rows.iter().filter(|row| row.policy == policy);
            of_policy.map(|row| row.time_ms).collect::<Vec<_>>()
        };
        assert_eq!(times("as-they-come"), [72.0, 16.0]);
        for policy in ["snake", "greedy", "refined"] {
            assert_eq!(times(policy), [44.0, 44.0], "{policy}");
        }
        let summary = summary(&rows);
        assert_eq!(summary.len(), 4);
        let first = &summary[0];
        assert_eq!(
            (first.steps, first.slowest_ms, first.mean_ms),
            (1, 72.0, 44.0)
        );
        assert_eq!(first.worst_ratio, 72.0 / 44.0);
        assert_eq!(summary[3].waiting_percent, 0.0);
    }

    #[test]
    fn steps_follow_one_another_and_a_part_of_one_is_left_out() {
        let line =
            "--ranks 3 --rows-per-rank 1 --row-tokens 64 --distribution equal:50 --total 500";
        let rows = rows(line).unwrap();
        let as_they_come: Vec<_> = rows
            .iter()
            .filter(|row| row.policy == "as-they-come")
            .map(|row| (row.step, row.rank, row.rows.as_slice()))
            .collect();
        assert_eq!(
            as_they_come,
            [
                (0, 0, &[0][..]),
                (0, 1, &[1]),
                (0, 2, &[2]),
                (1, 0, &[3]),
                (1, 1, &[4]),
                (1, 2, &[5])
            ]
        );
        assert_eq!(summary(&rows)[0].steps, 2);
    }

    #[test]
    fn too_few_documents_are_refused() {
        let line =
            "--ranks 3 --rows-per-rank 1 --row-tokens 64 --distribution equal:50 --total 100";
        let error = rows(line).unwrap_err().to_string();
        assert!(error.contains("fill 1 rows of 64 tokens"), "{error}");
        assert!(error.contains("takes 3"), "{error}");
    }
}
