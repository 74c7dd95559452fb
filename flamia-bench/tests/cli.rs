//! The program's command line, as far as it needs neither GPU nor torch.

use std::process::{Command, Output};

fn bench(line: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flamia-bench"))
        .args(line)
        // A GPU that is there is not seen.
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap()
}

/// Standard error of a command line that is refused.
fn refusal(line: &[&str]) -> String {
    let output = bench(line);
    assert!(!output.status.success(), "{line:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_profile_is_printed_and_nothing_run() {
    let output = bench(&["--profile", "attention_forward"]);
    assert!(output.status.success());
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(
        line.starts_with("ncu --clock-control none ")
            && line.contains("-k 'regex:attention_forward'")
            && line.contains("--workload 4x4096 --mask causal"),
        "{line}"
    );
}

#[test]
fn attention_without_a_gpu_says_what_to_do() {
    for line in [
        &[][..],
        &["attention"],
        &["--check", "--workload", "16x1024"],
        &["attention", "--memory"],
        &["ablate"],
    ] {
        let error = refusal(line);
        let expected = match cfg!(feature = "torch") {
            true => "there is no NVIDIA GPU to time attention on",
            false => "built without torch",
        };
        assert!(
            error.starts_with("error: ") && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn mistakes_are_found_before_anything_runs() {
    let error = refusal(&["--peers", "causal:no/peers.json"]);
    assert!(error.contains("no/peers.json"), "{error}");
    for flag in ["--json", "--svg"] {
        let error = refusal(&[flag, "no/rows"]);
        assert!(error.contains("there is no folder no;"), "{error}");
    }
    let error = refusal(&["ablate", "--svg", "no/bars.svg"]);
    assert!(error.contains("there is no folder no;"), "{error}");
    let error = refusal(&["ablate", "--without", "longest-frist"]);
    assert!(error.contains("longest-first"), "{error}");
    let error = refusal(&["atention"]);
    assert!(
        error.contains("similar") && error.contains("attention"),
        "{error}"
    );
    let error = refusal(&["--workload", "4x4906"]);
    assert!(error.contains("4x4096"), "{error}");
}

#[test]
fn help_is_the_programs_and_the_subjects() {
    let help = |line: &[&str]| String::from_utf8(bench(line).stdout).unwrap();
    let all = help(&["--help"]);
    for command in [
        "attention",
        "ablate",
        "cpu",
        "schedules",
        "--check",
        "--peers",
        "--json",
    ] {
        assert!(all.contains(command), "{command} in\n{all}");
    }
    let attention = help(&["attention", "--help"]);
    for told in ["schedule", "L2", "CAUSAL=0", "flamia", "1x16384"] {
        assert!(attention.contains(told), "{told} in\n{attention}");
    }
    let ablate = help(&["ablate", "--help"]);
    for told in [
        "4.3",
        "longest-first",
        "two-kernels",
        "ratio",
        "nine packed rows",
    ] {
        assert!(ablate.contains(told), "{told} in\n{ablate}");
    }
}
