//! The trainer's program: settings, run, exit code.
//!
//! Exit codes: 0 when all steps are done, 130 when stopped by Ctrl-C (or SIGTERM) after saving, 2
//! for settings that are refused, 1 for any other error.

use std::ffi::OsString;
use std::process::ExitCode;

use flamia_train::error::{TrainError, chain};
use flamia_train::stop::{STOPPED, Stop};
use flamia_train::trainer::{Outcome, Trainer};

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match run(&args) {
        Ok(Outcome::Finished) => ExitCode::SUCCESS,
        Ok(Outcome::Stopped) => ExitCode::from(STOPPED),
        Err(TrainError::Settings(error)) => error.report(),
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[OsString]) -> Result<Outcome, TrainError> {
    let stop = Stop::on_signals()?;
    Trainer::from_args(args, stop)?.run()
}
