//! `cargo xtask report`: runs side by side as an HTML page.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use flamia_train::atomic::atomic_write;
use flamia_train::report::{Along, RunRecord, loss_chart, page, rows};

/// Show runs side by side: loss curves, throughput, results, and the settings that differ.
#[derive(Parser)]
#[command(name = "report", bin_name = "cargo xtask report")]
struct Args {
    /// Folders of runs, finished or still going on
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page, one file that needs no other
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Also write the loss curves alone, over steps
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Also write what was measured at each evaluation, as a JSON list of flat rows
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match report(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn report(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let runs = args.runs.iter().map(|run| RunRecord::read(run));
    let runs = runs.collect::<Result<Vec<_>, _>>()?;
    atomic_write(&args.out, page(&runs)?.as_bytes())?;
    println!("wrote {}", args.out.display());
    if let Some(svg) = &args.svg {
        atomic_write(svg, loss_chart(&runs, Along::Steps)?.as_bytes())?;
        println!("wrote {}", svg.display());
    }
    if let Some(json) = &args.json {
        atomic_write(json, &serde_json::to_vec_pretty(&rows(&runs))?)?;
        println!("wrote {}", json.display());
    }
    Ok(())
}
