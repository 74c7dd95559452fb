//! The benchmarks' program: one subcommand per device.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use flamia_bench::cpu::Cpu;
use flamia_probe::ProbeError;
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

fn run(cli: Cli) -> Result<(), ProbeError> {
    let Device::Cpu { bench, output } = cli.device;
    let rows = bench.rows()?;
    Ok(output.show("throughput of attention on the CPU", &rows)?)
}
