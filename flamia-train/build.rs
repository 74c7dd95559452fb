//! Writes libtorch's folder into the binaries' run path, and what built the crate into summaries.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    run_path();
    build_facts();
}

/// Lets the trainer and the tests start without `LD_LIBRARY_PATH`. Link arguments do not travel
/// from torch-sys to its dependents, and cargo tells the folder only to those that name torch-sys
/// themselves.
fn run_path() {
    let unix = std::env::var_os("CARGO_CFG_UNIX").is_some();
    if let Some(folder) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").filter(|_| unix) {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}

/// Compiler, commit and the version of tch, for a run's summary.
fn build_facts() {
    let rustc = std::env::var("RUSTC").expect("cargo sets RUSTC");
    let rustc = output(&rustc, &["--version"]).unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=BUILD_RUSTC={rustc}");

    let lock = std::fs::read_to_string("../Cargo.lock").unwrap_or_default();
    let tch = locked(&lock, "tch").unwrap_or("unknown");
    println!("cargo::rustc-env=BUILD_TCH={tch}");

    if let Some(commit) = output("git", &["rev-parse", "HEAD"]) {
        println!("cargo::rustc-env=BUILD_COMMIT={commit}");
    }
    // The log of HEAD changes with every commit and checkout; HEAD itself may just name a branch.
    println!("cargo::rerun-if-changed=../Cargo.lock");
    if let Some(log) = output("git", &["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}

/// What `program` prints, if it can be run and succeeds.
fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_string())
}

/// The version of the package `name` in the text of a Cargo.lock.
fn locked<'a>(lock: &'a str, name: &str) -> Option<&'a str> {
    let package = format!("name = \"{name}\"\nversion = \"");
    lock.split_once(&package)?.1.split('"').next()
}
