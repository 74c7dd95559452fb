//! The command line of the workspace. It builds without libtorch, and sets libtorch up for what
//! needs it.

mod cargo;
mod cli;
mod compiler;
mod cuda;
mod doctor;
mod launch;
mod libtorch;
mod nvrtc;
mod pip;
mod process;
mod python;
mod remedy;
mod surroundings;
mod tensorboard;
#[cfg(test)]
mod testing;
mod transformers;
mod venv;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Task};
use crate::surroundings::Surroundings;

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<ExitCode> {
    let here = Surroundings::of_this_process()?;
    match task {
        Task::Train { args } => cargo::train(&here, &args),
        Task::Eval { args } => cargo::eval(&here, &args),
        Task::Generate { args } => cargo::generate(&here, &args),
        Task::Export { args } => cargo::hugging_face(&here, "export", &args),
        Task::Import { args } => cargo::hugging_face(&here, "import", &args),
        Task::Report { args } => cargo::report_on_runs(&here, &args),
        Task::Data { args } => cargo::data(&here, &args),
        Task::Probe { args } => cargo::probe(&here, &args),
        Task::Bench { args } => cargo::bench(&here, &args),
        Task::Sched { args } => cargo::sched(&here, &args),
        Task::Test { transformers, args } => cargo::test(&here, transformers, &args),
        Task::Lint => cargo::lint(&here),
        Task::Cargo { args } => cargo::run_with_libtorch(&here, &args),
        Task::Env => cargo::print_environment(&here),
        Task::Doctor { json } => doctor::run(&here, json),
        Task::Tensorboard {
            logdir,
            install: false,
            args,
        } => tensorboard::start(&here, &logdir, &args),
        Task::Tensorboard { install: true, .. } => tensorboard::install(&here),
    }
}
