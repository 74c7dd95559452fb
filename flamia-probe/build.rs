//! Writes libtorch's folder into the binary's run path, and the commit into the tables' captions.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Set only when torch-sys is built in; link arguments do not travel from there to here.
    let unix = std::env::var_os("CARGO_CFG_UNIX").is_some();
    if let Some(folder) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").filter(|_| unix) {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        println!("cargo::rustc-env=BUILD_COMMIT={commit}");
    }
    // The log of HEAD changes with every commit and checkout; HEAD itself may just name a branch.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_string())
}
