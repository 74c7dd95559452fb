//! A run that is killed at any moment, or stopped, goes on as if nothing had happened.
#![cfg(all(unix, feature = "torch"))]

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use common::run::{Workplace, args, checkpoints, saved_tensors, summary};

/// More than twenty kills can outrun on a fast machine.
const STEPS: u64 = 240;
const KILLS: u64 = 20;

impl Workplace {
    /// Starts the trainer's own binary, which saves after every step.
    fn start(&self, name: &str, resume: bool) -> Child {
        let mut more = format!(
            "--steps {STEPS} --checkpoint-every 1 --eval-every 40 \
             --attention mxfp8"
        );
        if resume {
            more += " --resume";
        }
        Command::new(env!("CARGO_BIN_EXE_flamia-train"))
            .args(args(&self.data, &self.run(name), &more))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs to the end and returns what it told.
    fn finish(&self, name: &str, resume: bool) -> String {
        let output = self.start(name, resume).wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{told}");
        told
    }
}

/// Reads on until the trainer says that the run is set up, and returns what it told.
fn wait_for_start(child: &mut Child) -> String {
    let mut told = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        told += &line.unwrap();
        told.push('\n');
        if told.contains("model: ") {
            break;
        }
    }
    told
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill")
        .args([name, &child.id().to_string()])
        .status();
    assert!(status.unwrap().success());
}

fn wait(child: &mut Child, at_most: Duration) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(start.elapsed() < at_most, "still running after {at_most:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn newest_step(run: &Path) -> u64 {
    let names = checkpoints(run);
    let steps = names
        .iter()
        .filter_map(|name| name.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}

#[test]
fn killed_twenty_times_it_ends_with_the_same_weights() {
    let workplace = Workplace::new();
    workplace.finish("whole", false);
    let killed = workplace.run("killed");
    let mut in_mid_run = 0;
    for kill in 0..KILLS {
        let before = newest_step(&killed);
        let mut child = workplace.start("killed", killed.join("settings.toml").exists());
        let told = wait_for_start(&mut child);
        assert!(told.contains("model: "), "it did not start: {told}");
        // Some die in their first step, the others after one or more saves.
        let start = Instant::now();
        while kill % 4 != 0 && newest_step(&killed) == before {
            assert!(start.elapsed() < Duration::from_secs(30), "no step in 30 s");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(kill * 37 % 41));
        child.kill().unwrap();
        child.wait().unwrap();
        in_mid_run += u64::from((1..STEPS).contains(&newest_step(&killed)));
    }
    assert!(
        in_mid_run >= KILLS / 2,
        "only {in_mid_run} kills fell between two steps"
    );
    let told = workplace.finish("killed", true);
    assert!(told.contains("resumed from"), "{told}");
    assert_eq!(
        saved_tensors(&killed, STEPS),
        saved_tensors(&workplace.run("whole"), STEPS)
    );
    for value in ["val_loss_first", "val_loss", "val_loss_best", "tokens"] {
        assert_eq!(
            summary(&killed)[value],
            summary(&workplace.run("whole"))[value],
            "{value}"
        );
    }
    let left = checkpoints(&killed);
    assert!(
        left.iter().all(|name| name.starts_with("step-")),
        "{left:?}"
    );
}

#[test]
fn an_interrupted_run_saves_exits_and_goes_on() {
    for name in ["-INT", "-TERM"] {
        let workplace = Workplace::new();
        let run = workplace.run("stopped");
        let mut child = workplace.start("stopped", false);
        while newest_step(&run) < 3 {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(&child, name);
        let status = wait(&mut child, Duration::from_secs(20));
        assert_eq!(status.code(), Some(130), "{name}");
        let steps = summary(&run)["steps"].as_u64().unwrap();
        assert!((3..STEPS).contains(&steps), "{name}: stopped after {steps}");
        assert_eq!(newest_step(&run), steps, "{name}");

        workplace.finish("stopped", true);
        workplace.finish("whole", false);
        assert_eq!(
            saved_tensors(&run, STEPS),
            saved_tensors(&workplace.run("whole"), STEPS)
        );
    }
}

#[test]
fn asked_twice_it_leaves_at_once_with_the_same_code() {
    let workplace = Workplace::new();
    let run = workplace.run("left");
    for resume in [false, true] {
        let before = newest_step(&run);
        let mut child = workplace.start("left", resume);
        while newest_step(&run) == before {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(&child, "-INT");
        signal(&child, "-TERM");
        let status = wait(&mut child, Duration::from_secs(20));
        assert_eq!(status.code(), Some(130), "{status}");
        assert!(newest_step(&run) < STEPS);
    }
    workplace.finish("left", true);
}

#[test]
fn only_one_process_trains_in_a_folder() {
    let workplace = Workplace::new();
    let mut first = workplace.start("run", false);
    while newest_step(&workplace.run("run")) < 1 {
        std::thread::sleep(Duration::from_millis(2));
    }
    let second = workplace.start("run", true).wait_with_output().unwrap();
    first.kill().unwrap();
    first.wait().unwrap();
    let told = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1), "{told}");
    assert!(told.contains("another process is training"), "{told}");
}
