//! The benchmarks' program: one subcommand per device. `cargo xtask sched` runs it too, with the word
//! `sched` in front.

use std::error::Error;
use std::process::ExitCode;
use std::{env, iter};

use clap::{Parser, Subcommand};
use flamia_bench::cpu::Cpu;
use flamia_bench::sched;
use flamia_bench::schedules::Schedules;
use flamia_probe::report::Output;

/// Measure how fast each path of attention is
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench", version)]
struct Cli {
    #[command(subcommand)]
    device: Device,
}

#[derive(Subcommand)]
enum Device {
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
    match cli.device {
        Device::Cpu { bench, output } => {
            output.show("throughput of attention on the CPU", &bench.rows()?)?;
        }
        Device::Schedules { bench, output } => {
            output.show("schedules built on the GPU", &bench.rows()?)?;
        }
    }
    Ok(())
}
