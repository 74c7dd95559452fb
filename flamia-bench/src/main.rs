//! The benchmarks' program: one subcommand for each subject, attention on the GPU without one. `cargo
//! xtask sched` runs it too, with the word `sched` in front.

use std::error::Error;
use std::process::ExitCode;
use std::{env, iter};

use clap::{Parser, Subcommand};
use flamia_bench::ablate::Ablate;
use flamia_bench::attention::Attention;
use flamia_bench::cpu::Cpu;
use flamia_bench::sched;
use flamia_bench::schedules::Schedules;
use flamia_probe::report::Output;

/// Measure how fast attention is
///
/// Without a command: on the GPU, beside every other attention there, as `cargo xtask bench attention
/// --help` tells at length.
#[derive(Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    version,
    args_conflicts_with_subcommands = true
)]
struct Cli {
    #[command(subcommand)]
    subject: Option<Subject>,
    #[command(flatten)]
    attention: OnGpu,
}

// `bench attention`, and `bench` itself. Undocumented for the reason given below.
#[derive(clap::Args)]
struct OnGpu {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    bench: Attention,
}

#[derive(Subcommand)]
enum Subject {
    Attention(OnGpu),
    Ablate {
        #[command(flatten)]
        output: Output,
        #[command(flatten)]
        bench: Ablate,
    },
    // No documentation of its own: the last one below becomes the subcommand's.
    Cpu {
        #[command(flatten)]
        output: Output,
        #[command(flatten)]
        bench: Cpu,
    },
    Schedules {
        #[command(flatten)]
        output: Output,
        #[command(flatten)]
        bench: Schedules,
    },
}

fn main() -> ExitCode {
    let mut args = env::args_os();
    let done = match args.nth(1) {
        Some(word) if word == "sched" => {
            let line = iter::once("sched".into()).chain(args);
            sched::run(&sched::Cli::parse_from(line)).map_err(|error| error.to_string())
        }
        _ => run(Cli::parse()).map_err(|error| error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    let subject = cli.subject.unwrap_or(Subject::Attention(cli.attention));
    match subject {
        Subject::Attention(OnGpu { output, bench }) => bench.run(&output)?,
        Subject::Ablate { output, bench } => bench.run(&output)?,
        Subject::Cpu { bench, output } => {
            output.show("throughput of attention on the CPU", &bench.rows()?)?;
        }
        Subject::Schedules { bench, output } => {
            output.show("schedules built on the GPU", &bench.rows()?)?;
        }
    }
    Ok(())
}
