//! The benchmarks' program: one subcommand per device.

use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use flamia_bench::cpu::Cpu;
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
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn Error>> {
    Ok(match cli.device {
        Device::Cpu { bench, output } => {
            output.show("throughput of attention on the CPU", &bench.rows()?)?
        }
        Device::Schedules { bench, output } => {
            output.show("schedules built on the GPU", &bench.rows()?)?
        }
    })
}
