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
