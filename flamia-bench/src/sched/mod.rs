//! `cargo xtask sched`: schedules of packed documents, simulated.

mod error;
mod policy;
mod ranks;
mod simulate;
mod source;
mod timeline;

use clap::{Parser, Subcommand};
use flamia_probe::report::Output;

pub use error::SchedError;
pub use policy::{Acquire, Schedule};
pub use ranks::{Batch, RankRow, Summary};
pub use simulate::{CostName, PassName, Row, Simulate};
pub use source::{Distribution, Source};

/// See how schedules of packed documents keep GPUs busy
#[derive(Parser)]
#[command(name = "cargo xtask sched", bin_name = "cargo xtask sched", version)]
pub struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    // No documentation of its own: the last one below becomes the subcommand's.
    Simulate {
        #[command(flatten)]
        output: Output,
        #[command(flatten)]
        simulate: Box<Simulate>,
    },
}

/// Does what the command line asks for.
///
/// # Errors
/// Documents that cannot be had, settings that do not go together, files that cannot be written.
pub fn run(cli: &Cli) -> Result<(), SchedError> {
    let Task::Simulate { simulate, output } = &cli.task;
    match simulate.batch.ranks {
        Some(ranks) => {
            let (batch, source) = (&simulate.batch, &simulate.source);
            let rows = batch.rows(ranks, source, simulate.mask)?;
            let caption = "a global batch's rows shared among ranks, simulated: times in ms";
            output.show_summary(caption, &ranks::summary(&rows), &rows)?;
        }
        None => {
            let rows = simulate.rows()?;
            let summary: Vec<_> = rows.iter().map(Row::summary).collect();
            output.show_summary(&simulate.caption(), &summary, &rows)?;
            if let Some(path) = &simulate.svg {
                timeline::draw(path, simulate)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// The settings of a command line.
    pub fn parsed(line: &str) -> Simulate {
        let words = ["sched", "simulate"]
            .into_iter()
            .chain(line.split_whitespace());
        let Task::Simulate { simulate, .. } = Cli::try_parse_from(words).unwrap().task;
        *simulate
    }

    fn refused(line: &str) -> String {
        let words = ["sched", "simulate"]
            .into_iter()
            .chain(line.split_whitespace());
        match Cli::try_parse_from(words) {
            Ok(_) => panic!("{line} was taken"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn near_misses_get_the_right_name() {
        for (line, name) in [
            ("--workload logu11-16", "logu11-16k"),
            ("--policy longest-dynamik", "longest-dynamic"),
            ("--cost hoper", "hopper"),
        ] {
            let error = refused(line);
            assert!(
                error.contains("similar value") && error.contains(name),
                "{error}"
            );
        }
    }

    #[test]
    fn what_would_be_ignored_is_refused() {
        for line in [
            "--ranks 2 --workload 4x4096",
            "--ranks 2 --sms 132",
            "--ranks 2 --svg a.svg",
            "--rows-per-rank 2",
            "--total 4096",
            "--workload 4x4096 --lengths a.txt",
            "--heads-per-section 2 --l2-mib 50",
        ] {
            refused(line);
        }
        for line in [
            "--latency=-1",
            "--per-block-us nan",
            "--sms 0",
            "--heads 0",
            "--mask windw:3",
        ] {
            assert!(refused(line).contains("invalid value"), "{line}");
        }
    }

    #[test]
    fn rows_have_the_documented_keys_and_agree_with_themselves() {
        let rows = parsed("").rows().unwrap();
        // Nine workloads, two GPUs, ten policies.
        assert_eq!(rows.len(), 9 * 2 * 10);
        for row in &rows {
            assert!(row.makespan >= row.bound && row.bound >= row.longest_item);
            assert!((row.ratio * row.bound - row.makespan).abs() < 1e-9 * row.makespan);
        }
        let json = serde_json::to_value(&rows[0]).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().collect();
        let expected = [
            "documents",
            "pass",
            "mask",
            "heads",
            "heads_per_section",
            "item_rows",
            "positions",
            "sms",
            "per_block",
            "per_item",
            "policy",
            "makespan",
            "bound",
            "ratio",
            "idle_percent",
            "longest_item",
            "version",
        ];
        assert_eq!(keys, expected);
    }

    /// Four query tiles of 256 rows: 2, 4, 6 and 8 key blocks; backward, eight key tiles of 128
    /// rows: 8 query blocks down to 1.
    #[test]
    fn settings_reach_the_simulation() {
        let one = |line: &str| {
            let line = format!("--distribution fixed:1024 --heads 1 --sms 1 {line}");
            let rows = parsed(&line).rows().unwrap();
            (rows.len(), rows[0].makespan, rows[0].positions)
        };
        assert_eq!(one(""), (10, 20.0, 4));
        assert_eq!(one("--mask full"), (10, 32.0, 4));
        assert_eq!(one("--mask window:1"), (10, 8.0, 4));
        assert_eq!(one("--item-rows 128"), (10, 36.0, 8));
        assert_eq!(one("--pass backward"), (11, 36.0, 8));
        assert_eq!(one("--per-block-us 0.5 --per-item-us 3"), (10, 22.0, 4));
        assert_eq!(one("--policy longest-dynamic --latency 2"), (1, 26.0, 4));
        assert_eq!(
            one("--policy longest-dynamic --latency 2 --lead 2"),
            (1, 20.0, 4)
        );
        let (_, makespan, items) = one("--cost hopper --policy longest-dynamic");
        assert_eq!(items, 8);
        assert!((makespan - (8.0 * 4.6 + 36.0 * 1.03)).abs() < 1e-9);
        let error = parsed("--policy longest-launches").rows().unwrap_err();
        assert!(error.to_string().contains("--pass backward"));
    }

    #[test]
    fn sections_fit_the_cache() {
        let per_section = |line: &str| {
            let line = format!("{line} --sms 1 --policy longest-dynamic");
            parsed(&line).rows().unwrap()[0].heads_per_section
        };
        assert_eq!(per_section("--workload 16x4096"), 16);
        assert_eq!(per_section("--workload 16x4096 --heads-per-section 3"), 3);
        // K and V of a head are 65,536 rows of 256 bytes: 16 MiB.
        assert_eq!(per_section("--workload 16x4096 --l2-mib 50"), 3);
        // Four heads share them.
        assert_eq!(
            per_section("--workload 16x4096 --kv-heads 4 --l2-mib 50"),
            12
        );
        assert_eq!(
            per_section("--workload 16x4096 --l2-mib 70 --pass backward"),
            2
        );
    }
}
