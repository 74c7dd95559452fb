//! `cargo xtask eval`: a checkpoint's loss, through its own attention and through exact attention.

use std::process::ExitCode;

use clap::Parser;
use flamia_train::commands::EvalArgs;
use flamia_train::error::chain;
use flamia_train::leak_test::LeakTest;

fn main() -> ExitCode {
    let args = EvalArgs::parse();
    match eval(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn eval(args: &EvalArgs) -> Result<(), Box<dyn std::error::Error>> {
    let result = LeakTest::run(args, &mut |note| eprintln!("{note}"))?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&result)?),
        false => println!("{}", result.table()),
    }
    Ok(())
}
