//! `cargo xtask generate`: text from a checkpoint, on standard output.

use std::io::{self, ErrorKind, IsTerminal};
use std::num::NonZero;
use std::process::ExitCode;

use clap::Parser;
use flamia_train::commands::GenerateArgs;
use flamia_train::error::chain;
use flamia_train::generate::{End, GenerateError, Sampling, Writer};

fn main() -> ExitCode {
    match generate(&GenerateArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // `| head` has read enough.
        Err(GenerateError::Write(error)) if error.kind() == ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn generate(args: &GenerateArgs) -> Result<(), GenerateError> {
    let writer = Writer::open(args)?;
    let saved = &writer.saved;
    for warning in &saved.warnings {
        eprintln!("warning: {warning}");
    }
    eprintln!(
        "{}, after step {}, on {}",
        saved.checkpoint.display(),
        saved.state.step,
        writer.device_words
    );
    for change in &saved.changes {
        eprintln!("other than in the run: {change}");
    }
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k.map(NonZero::get),
        top_p: args.top_p,
        seed: args.seed,
    };
    let written = writer.write(&args.prompt, args.tokens, &sampling, &mut io::stdout())?;
    if io::stdout().is_terminal() {
        println!();
    }
    let end = match written.end {
        End::Document => "the model ended the document",
        End::Tokens => "as many as --tokens asks for",
    };
    eprintln!(
        "{} tokens, {:.1} a second: {end}",
        written.tokens,
        written.tokens as f64 / written.time.as_secs_f64()
    );
    let row = saved.settings.batch.row_tokens;
    if written.positions > row {
        eprintln!(
            "note: the text is longer than the {row} tokens of context that the run trained on"
        );
    }
    Ok(())
}
