//! The tasks that are cargo's, with libtorch's environment around it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Parser;
use flamia_train::commands::{EvalArgs, GenerateArgs};
use flamia_train::settings::{Settings, SettingsError, Start, split_nproc};
use serde::Deserialize;

use crate::launch;
use crate::libtorch::{self, Ready};
use crate::nvrtc;
use crate::process::{become_command, run, say, shown, spoken};
use crate::surroundings::Surroundings;
use crate::transformers;

/// Builds the trainer and becomes it: its exit code and its Ctrl-C are the trainer's own. With
/// `--nproc` starts several, of which that is as true.
///
/// Help, misspelt settings and values that do not go together are answered first, before a long
/// set-up. The trainer checks again, with the settings of the run that it may resume.
pub fn train(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let checked = split_nproc(args).and_then(|(ranks, args)| {
        check_settings(&args)?;
        Ok((ranks, args))
    });
    let (ranks, args) = match checked {
        Ok(checked) => checked,
        Err(error) => return Ok(error.report()),
    };
    let ready = libtorch::set_up(here)?;
    let trainer = build(cargo(here, &ready)?, "flamia-train", &[])?;
    say(format_args!("ready in {}", spoken(start.elapsed())));
    let trainer = || {
        let mut trainer = here.command(&trainer);
        ready.apply(&mut trainer);
        trainer.args(&args);
        trainer
    };
    match ranks {
        1 => become_command(&mut trainer()),
        ranks => launch::ranks(ranks, trainer),
    }
}

/// Builds the trainer's program that evaluates a checkpoint and becomes it.
pub fn eval(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    use_checkpoint::<EvalArgs>(here, "flamia-eval", args)
}

/// Builds the trainer's program that lets a checkpoint write and becomes it.
pub fn generate(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    use_checkpoint::<GenerateArgs>(here, "flamia-generate", args)
}

/// Builds and becomes a program of the trainer's. Its help and usage errors are told first, before a
/// long set-up.
fn use_checkpoint<A: Parser>(
    here: &Surroundings,
    program: &str,
    args: &[OsString],
) -> anyhow::Result<ExitCode> {
    if let Some(code) = told_usage::<A>(program, args) {
        return Ok(code);
    }
    let ready = libtorch::set_up(here)?;
    let program = build_program(cargo(here, &ready)?, "flamia-train", program, &[])?;
    let mut program = here.command(program);
    ready.apply(&mut program);
    become_command(program.args(args))
}

/// Prints the help or the usage error that `args` lead to, if to any, and gives its exit code.
fn told_usage<A: Parser>(program: &str, args: &[OsString]) -> Option<ExitCode> {
    let line = std::iter::once(OsString::from(program)).chain(args.iter().cloned());
    let usage = A::try_parse_from(line).err()?;
    // A closed pipe (`--help | head`) is no reason to fail.
    let _ = usage.print();
    Some(u8::try_from(usage.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Builds the trainer's program that exports and imports models, and becomes it for the `task`.
pub fn hugging_face(
    here: &Surroundings,
    task: &str,
    args: &[OsString],
) -> anyhow::Result<ExitCode> {
    let ready = libtorch::set_up(here)?;
    let program = build_program(cargo(here, &ready)?, "flamia-train", "flamia-hf", &[])?;
    let mut program = here.command(program);
    ready.apply(&mut program);
    become_command(program.arg(task).args(args))
}

/// Builds the trainer's program that reports on runs, which needs no libtorch, and becomes it.
pub fn report_on_runs(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let without_torch = ["--no-default-features", "--features", "compare"];
    let cargo = plain_cargo(here)?;
    let program = build_program(cargo, "flamia-train", "flamia-report", &without_torch)?;
    become_command(here.command(program).args(args))
}

/// Builds the program for data, which needs no libtorch, and becomes it.
pub fn data(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let program = build(plain_cargo(here)?, "datasets", &[])?;
    become_command(here.command(program).args(args))
}

fn check_settings(args: &[OsString]) -> Result<(), SettingsError> {
    match Settings::start(args.iter().cloned(), std::env::vars_os())? {
        // The values that are left out come from the run then.
        Start::Resume { .. } => Ok(()),
        Start::New => Settings::load(args.iter().cloned()).map(drop),
    }
}

/// Builds the probes and becomes them, with torch only where a probe needs it.
pub fn probe(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    const PROBES: &str = "flamia-probe";
    if !needs_torch(args) {
        let probes = build(plain_cargo(here)?, PROBES, &[])?;
        return become_command(without_torch(here, &probes).args(args));
    }
    let ready = libtorch::set_up(here)?;
    let probes = build(cargo(here, &ready)?, PROBES, &["--features", "torch"])?;
    let mut probes = here.command(probes);
    ready.apply(&mut probes);
    become_command(probes.args(args))
}

/// Whether the probe trains, or compares with torch.
fn needs_torch(args: &[OsString]) -> bool {
    const NEEDY: [&str; 3] = ["capture", "consistency", "leakage"];
    args.first()
        .is_some_and(|name| NEEDY.iter().any(|needy| name == needy))
}

/// Builds the benchmarks and becomes them, with torch only where they compare with it.
pub fn bench(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    const BENCHMARKS: &str = "flamia-bench";
    if !compares_with_torch(args) {
        let benchmarks = build(plain_cargo(here)?, BENCHMARKS, &[])?;
        return become_command(without_torch(here, &benchmarks).args(args));
    }
    let ready = libtorch::set_up(here)?;
    let benchmarks = build(cargo(here, &ready)?, BENCHMARKS, &["--features", "torch"])?;
    let mut benchmarks = here.command(benchmarks);
    ready.apply(&mut benchmarks);
    become_command(benchmarks.args(args))
}

/// Whether attention on the GPU is to be timed: with its name, that of its parts or without any, and not when
/// it is only asked about.
fn compares_with_torch(args: &[OsString]) -> bool {
    const ASKING: [&str; 5] = ["--help", "-h", "--version", "-V", "--profile"];
    let is_asking = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        ASKING.contains(&arg.split('=').next().unwrap_or_default())
    };
    let is_attention = args.first().is_none_or(|first| {
        let first = first.to_string_lossy();
        first == "attention" || first == "ablate" || first.starts_with('-')
    });
    is_attention && !args.iter().any(is_asking)
}

/// A program that needs no libtorch, and finds the NVRTC that is there.
fn without_torch(here: &Surroundings, program: &Path) -> Command {
    let mut command = here.command(program);
    let libtorch = libtorch::find(here).ok().and_then(|found| found.libtorch);
    let folder = libtorch.map(|libtorch| libtorch.folder);
    if let Some(nvrtc) = nvrtc::value(here, folder.as_deref()) {
        command.env(nvrtc::SETTING, nvrtc);
    }
    command
}

/// The part of the benchmarks' program that simulates.
pub fn sched(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let benchmarks = build(plain_cargo(here)?, "flamia-bench", &[])?;
    become_command(here.command(benchmarks).arg("sched").args(args))
}

/// Every test of the workspace, in the one profile that all is built in.
pub fn test(
    here: &Surroundings,
    with_transformers: bool,
    args: &[OsString],
) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let ready = libtorch::set_up(here)?;
    let python = with_transformers.then(|| transformers::set_up(here));
    let python = python.transpose()?;
    // Apart from the others: built with them, these would get the trainer's torch feature, and need
    // the libtorch that xtask is there to find. The benchmarks are tested in both their forms.
    let apart = vec!["--package", "xtask", "--package", "flamia-bench"];
    let others = [&["--workspace", "--exclude", "xtask"], &ALL_FEATURES[..]].concat();
    for packages in [apart, others] {
        let mut cargo = cargo(here, &ready)?;
        cargo.args(["test", "--release"]).args(packages).args(args);
        cargo.envs(python.iter().map(|python| (transformers::SETTING, python)));
        let code = run(&mut cargo)?;
        if code != 0 {
            return report("tests", code, start);
        }
    }
    report("tests", 0, start)
}

/// Formatting first, which needs no libtorch.
pub fn lint(here: &Surroundings) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let mut format = here.cargo()?;
    format
        .current_dir(&here.root)
        .args(["fmt", "--all", "--check"]);
    let code = run(&mut format)?;
    if code != 0 {
        say("`cargo fmt` mends the formatting");
        return report("formatting", code, start);
    }
    let ready = libtorch::set_up(here)?;
    let mut clippy = cargo(here, &ready)?;
    clippy
        .args(["clippy", "--release", "--workspace", "--all-targets"])
        .args(ALL_FEATURES)
        .args(["--", "-D", "warnings"]);
    report("lint", run(&mut clippy)?, start)
}

/// Any cargo command, in the folder where it was typed.
pub fn run_with_libtorch(here: &Surroundings, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let ready = libtorch::set_up(here)?;
    let mut cargo = here.cargo()?;
    ready.apply(&mut cargo);
    become_command(cargo.args(args))
}

/// Exports for a shell, so that plain cargo builds what `cargo xtask` builds, and rebuilds
/// nothing. The library path is for what carries no rpath, such as foreign test runners.
pub fn print_environment(here: &Surroundings) -> anyhow::Result<ExitCode> {
    let ready = libtorch::set_up(here)?;
    let (set, remove) = ready.variables();
    for (name, value) in set {
        println!("export {name}={}", quoted(&value));
    }
    for name in remove {
        println!("unset {name}");
    }
    let name = if cfg!(target_os = "macos") {
        "DYLD_LIBRARY_PATH"
    } else {
        "LD_LIBRARY_PATH"
    };
    let lib = ready.libtorch.folder.join("lib");
    // Expanded by the shell: ours is what `cargo run` made of it.
    println!(
        "export {name}={}${{{name}:+:${name}}}",
        quoted(&lib.display().to_string())
    );
    Ok(ExitCode::SUCCESS)
}

fn report(what: &str, code: u8, start: Instant) -> anyhow::Result<ExitCode> {
    let outcome = if code == 0 { "passed" } else { "failed" };
    say(format_args!(
        "{what} {outcome} after {}",
        spoken(start.elapsed())
    ));
    Ok(ExitCode::from(code))
}

/// Turns on, in a command for the whole workspace, what is off by default: the probes and benchmarks
/// that need torch, and what is for GPUs.
const ALL_FEATURES: [&str; 2] = [
    "--features",
    "flamia-probe/torch,flamia-bench/torch,flamia-sched/cuda,flamia-kernels/cuda",
];

/// Cargo at the workspace's root.
fn plain_cargo(here: &Surroundings) -> anyhow::Result<Command> {
    let mut cargo = here.cargo()?;
    cargo.current_dir(&here.root);
    Ok(cargo)
}

/// Cargo at the workspace's root, with libtorch's environment.
fn cargo(here: &Surroundings, ready: &Ready) -> anyhow::Result<Command> {
    let mut cargo = plain_cargo(here)?;
    ready.apply(&mut cargo);
    Ok(cargo)
}

/// What of cargo's messages is read: which file a binary was built to.
#[derive(Deserialize)]
struct Artifact {
    reason: String,
    target: Option<ArtifactTarget>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct ArtifactTarget {
    name: String,
}

/// The executable that the message announces, if it is the one of this name.
fn executable(message: &str, name: &str) -> Option<PathBuf> {
    let artifact: Artifact = serde_json::from_str(message).ok()?;
    let is_it = artifact.reason == "compiler-artifact" && artifact.target?.name == name;
    artifact.executable.filter(|_| is_it)
}

/// Builds the package's program of the same name.
fn build(cargo: Command, package: &str, features: &[&str]) -> anyhow::Result<PathBuf> {
    build_program(cargo, package, package, features)
}

/// Builds a program of the package in release and returns its path, which a `build.target` in cargo's
/// configuration would move.
fn build_program(
    mut cargo: Command,
    package: &str,
    program: &str,
    features: &[&str],
) -> anyhow::Result<PathBuf> {
    cargo
        .args(["build", "--release", "--package", package, "--bin", program])
        .args(features);
    say(shown(&cargo));
    let mut child = cargo
        .arg("--message-format=json-render-diagnostics")
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo")?;
    let messages = child.stdout.take().map(BufReader::new);
    let lines = messages
        .into_iter()
        .flat_map(BufRead::lines)
        .map_while(Result::ok);
    let path = lines.filter_map(|line| executable(&line, program)).last();
    if !child.wait()?.success() {
        bail!("{program} does not build; cargo says why above");
    }
    path.with_context(|| format!("cargo built {program} and did not say where"))
}

/// The value as one word of a POSIX shell.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    /// A machine with a libtorch, a compiler, and a cargo that runs this script.
    fn machine(cargo: &str) -> (Machine, Surroundings) {
        let machine = Machine::bare();
        machine.script("c++", "");
        machine.script("cargo", cargo);
        let torch = machine.wheel("lib torch", "2.11.0");
        let here = machine.here_with(&[("LIBTORCH", &torch)]);
        (machine, here)
    }

    #[test]
    fn the_trainer_is_where_cargo_says() {
        let message = |name: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"x","target":{{"kind":["bin"],"name":"{name}"}},"executable":"/t/release/{name}"}}"#
            )
        };
        let lines = [
            message("other"),
            message("flamia-train"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let (_machine, here) = machine(&format!("echo '{}'", lines.join("\n")));
        let trainer = build(plain_cargo(&here).unwrap(), "flamia-train", &[]).unwrap();
        assert_eq!(trainer, PathBuf::from("/t/release/flamia-train"));
    }

    #[test]
    fn help_and_usage_errors_need_no_set_up() {
        let code = |line: &[&str]| {
            let args: Vec<OsString> = line.iter().map(OsString::from).collect();
            told_usage::<EvalArgs>("flamia-eval", &args)
        };
        assert_eq!(code(&["--help"]), Some(ExitCode::SUCCESS));
        assert_eq!(code(&[]), Some(ExitCode::from(2)));
        assert_eq!(code(&["runs/a", "--no-such-flag"]), Some(ExitCode::from(2)));
        assert_eq!(code(&["runs/a", "--json"]), None);
    }

    #[test]
    fn a_failed_build_is_not_a_trainer() {
        let (_machine, here) = machine("exit 101");
        assert!(build(plain_cargo(&here).unwrap(), "flamia-train", &[]).is_err());
        assert_eq!(test(&here, false, &[]).unwrap(), ExitCode::from(101));
    }

    #[test]
    fn tests_run_in_release_with_what_was_added() {
        let (machine, here) = machine(r#"echo "$LIBTORCH: $*" >> "$LIBTORCH/../asked""#);
        test(&here, false, &["--".into(), "--nocapture".into()]).unwrap();
        let asked = std::fs::read_to_string(machine.path("asked")).unwrap();
        let libtorch = machine.path("lib torch").display().to_string();
        let wanted = [
            "--package xtask --package flamia-bench",
            "--workspace --exclude xtask --features flamia-probe/torch,flamia-bench/torch,flamia-sched/cuda,flamia-kernels/cuda",
        ]
        .map(|packages| format!("{libtorch}: test --release {packages} -- --nocapture\n"))
        .concat();
        assert_eq!(asked, wanted);
    }

    #[test]
    fn torch_is_set_up_only_for_the_probes_that_need_it() {
        let needs =
            |line: &[&str]| needs_torch(&line.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(needs(&["consistency", "--steps", "10"]) && needs(&["leakage"]));
        for line in [&[][..], &["--help"], &["accuracy", "--json", "leakage"]] {
            assert!(!needs(line), "{line:?}");
        }
    }

    #[test]
    fn torch_is_set_up_only_for_the_benchmark_that_compares_with_it() {
        let compares = |line: &[&str]| {
            compares_with_torch(&line.iter().map(OsString::from).collect::<Vec<_>>())
        };
        for line in [
            &[][..],
            &["attention"],
            &["--check"],
            &["attention", "--gpu", "1"],
            &["ablate", "--pass", "fwd"],
        ] {
            assert!(compares(line), "{line:?}");
        }
        for line in [
            &["cpu"][..],
            &["schedules", "--json", "attention"],
            &["--help"],
            &["attention", "-h"],
            &["ablate", "--help"],
            &["--profile", "quantise"],
            &["attention", "--profile=quantise"],
            &["atention"],
        ] {
            assert!(!compares(line), "{line:?}");
        }
    }

    #[test]
    fn a_program_without_libtorch_finds_nvrtc_beside_one() {
        let (machine, here) = machine("");
        machine.file("nvidia/cu13/lib/libnvrtc.so.13", "");
        let program = without_torch(&here, Path::new("bench"));
        let set = program
            .get_envs()
            .find(|(name, _)| *name == nvrtc::SETTING)
            .and_then(|(_, value)| value);
        assert_eq!(set, Some(machine.path("nvidia/cu13/lib").as_os_str()));
    }

    #[test]
    fn paths_survive_the_shell() {
        for path in ["/plain", "/with blank", "/it's $HOME"] {
            let script = format!("printf %s {}", quoted(path));
            let output = Command::new("/bin/sh")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), path);
        }
    }
}
