//! `cargo xtask data`: prepares token caches, and looks into them.

mod cli;
mod show;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use datasets::stats::{self, Stats};
use datasets::{Cache, ProgressLine, SpecialIds, Tokenizer};

use cli::{Cli, PrepareArgs, StatsArgs, Task};

type Outcome = Result<ExitCode, Box<dyn Error>>;

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Prepare(args) => prepare(&args),
        Task::Stats(args) => print_stats(&args),
        Task::Check { cache } => check(&cache),
        Task::Show(args) => show::show(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {}", chain(&*error));
        ExitCode::FAILURE
    })
}

/// An error and what caused it, those left out that say nothing new.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

fn prepare(args: &PrepareArgs) -> Outcome {
    let special = SpecialIds {
        bos: args.bos,
        eos: args.eos,
    };
    let tokenizer = match &args.tokenizer {
        Some(path) => Tokenizer::from_file(path, special)?,
        None => Tokenizer::byte_level(),
    };
    let mut line = ProgressLine::new();
    let cache = datasets::prepare(
        &args.data,
        &tokenizer,
        &args.out,
        &args.options(),
        &mut |progress| line.show(progress),
    )?;
    line.finish();
    println!("{}", cli::Described(&cache));
    Ok(ExitCode::SUCCESS)
}

fn print_stats(args: &StatsArgs) -> Outcome {
    let cache = Cache::open(&args.cache)?;
    let stats = Stats::of(&cache, &args.row_lengths())?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&stats)?);
    } else {
        println!("{stats}");
    }
    if let Some(path) = &args.plot {
        stats::plot(path, &stats)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check(cache: &std::path::Path) -> Outcome {
    let checks = Cache::check(cache)?;
    let damaged = checks.iter().filter(|check| check.result.is_err()).count();
    for check in &checks {
        match &check.result {
            Ok(()) => println!("{}: whole", check.name),
            Err(error) => println!("{}: {}", check.name, chain(error)),
        }
    }
    let shards = checks.len();
    if damaged > 0 {
        eprintln!(
            "error: {damaged} of {shards} shards of {} are damaged",
            cache.display()
        );
        return Ok(ExitCode::FAILURE);
    }
    println!("all {shards} shards are whole");
    Ok(ExitCode::SUCCESS)
}
