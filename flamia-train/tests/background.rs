//! Checkpoints that are written while training goes on.
#![cfg(feature = "torch")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::run::{Workplace, args, checkpoints, saved_tensors, summary, train};
use common::{ADAMW, floats, model, state, tiny_shape};
use flamia_train::checkpoint::{CheckpointError, Checkpoints, Saver};
use flamia_train::model::{Model, ModelShape};
use flamia_train::optim::AdamW;
use flamia_train::tensorboard::read_events;
use tch::no_grad;

struct Fixture {
    run: tempfile::TempDir,
    saver: Saver,
    model: Model,
    optimizer: AdamW,
}

impl Fixture {
    /// A run that keeps two checkpoints of megabytes each, so that a write takes its time.
    fn new() -> Self {
        let run = tempfile::tempdir().unwrap();
        let shape = ModelShape {
            vocab: 8192,
            dim: 128,
            ..tiny_shape()
        };
        let model = model(shape, 1);
        let optimizer = AdamW::new(ADAMW, &model.params).unwrap();
        let checkpoints = Checkpoints::open(run.path(), 2).unwrap();
        let saver = Saver::new(checkpoints);
        Self {
            run,
            saver,
            model,
            optimizer,
        }
    }

    fn save(&mut self, step: u64) -> Result<(), CheckpointError> {
        self.saver
            .save(&state(step), &self.model.params, &self.optimizer)
    }

    /// One update, which moves every weight and moment.
    fn go_on(&mut self) {
        for (_, param) in self.model.params.iter_mut() {
            param.square().sum(tch::Kind::Float).backward();
        }
        self.optimizer.update(&mut self.model.params, 0.1).unwrap();
    }

    fn values(&self) -> Vec<Vec<f32>> {
        let moments = self.optimizer.tensors(&self.model.params);
        let weights = self.model.params.iter().map(|(_, param)| param);
        weights
            .chain(moments.iter().map(|(_, moment)| *moment))
            .map(floats)
            .collect()
    }

    fn load(&mut self, step: u64) {
        let path = self.path(step);
        Checkpoints::verify(&path).unwrap();
        let found = Checkpoints::load(&path, &self.model.params, &mut self.optimizer);
        assert_eq!(found.unwrap(), state(step));
    }

    fn path(&self, step: u64) -> std::path::PathBuf {
        self.run.path().join(format!("checkpoints/step-{step:06}"))
    }
}

#[test]
fn a_checkpoint_holds_the_state_of_its_step_and_nothing_later() {
    let mut fixture = Fixture::new();
    let mut overlapped = 0;
    for step in 1..=5 {
        fixture.go_on();
        let saved = fixture.values();
        fixture.save(step).unwrap();
        fixture.go_on();
        overlapped += usize::from(fixture.saver.is_writing());
        assert_ne!(fixture.values(), saved);
        fixture.saver.wait().unwrap();
        fixture.load(step);
        assert!(fixture.values() == saved, "step {step}");
    }
    assert!(
        overlapped > 0,
        "every write was over before the next update"
    );
}

#[test]
fn one_after_another_they_come_in_order_and_the_oldest_go() {
    let mut fixture = Fixture::new();
    let mut states = Vec::new();
    for step in 1..=4 {
        fixture.go_on();
        states.push(fixture.values());
        fixture.save(step).unwrap();
        // The one before is whole, and the newest, as long as this one is not.
        if fixture.saver.is_writing() && step > 1 {
            let newest = Checkpoints::look(fixture.run.path()).newest().unwrap();
            let before = Some(fixture.path(step - 1));
            assert!(newest.whole == before || newest.whole == Some(fixture.path(step)));
        }
    }
    fixture.saver.wait().unwrap();
    assert_eq!(
        checkpoints(fixture.run.path()),
        ["step-000003", "step-000004"]
    );
    for step in [3, 4] {
        fixture.load(step);
        assert!(fixture.values() == states[step as usize - 1], "{step}");
    }
}

#[test]
fn what_is_being_written_is_finished_before_its_owner_goes() {
    let mut fixture = Fixture::new();
    fixture.save(1).unwrap();
    let Fixture { run, saver, .. } = fixture;
    drop(saver);
    Checkpoints::verify(&run.path().join("checkpoints/step-000001")).unwrap();
}

#[test]
fn a_write_that_fails_is_told_once_and_the_next_one_succeeds() {
    let mut fixture = Fixture::new();
    fixture.save(1).unwrap();
    fixture.saver.wait().unwrap();
    // A file where the next one wants its folder.
    let in_the_way = fixture
        .run
        .path()
        .join("checkpoints/.unfinished-step-000002");
    fs::write(&in_the_way, "").unwrap();
    fixture.save(2).unwrap();
    let error = loop {
        if let Err(error) = fixture.saver.check() {
            break error;
        }
        std::thread::yield_now();
    };
    assert!(error.to_string().contains("step-000002"), "{error}");
    fixture.saver.check().unwrap();
    assert_eq!(
        Checkpoints::look(fixture.run.path())
            .newest()
            .unwrap()
            .whole,
        Some(fixture.path(1))
    );

    // Whoever saves without having looked is told too, and that state is not written.
    fixture.save(2).unwrap();
    let error = fixture.save(3).unwrap_err();
    assert!(error.to_string().contains("step-000002"), "{error}");
    assert!(!fixture.path(3).exists());
    no_grad(|| {
        for (_, param) in fixture.model.params.iter_mut() {
            let _ = param.fill_(3.0);
        }
    });
    fixture.save(4).unwrap();
    fixture.saver.wait().unwrap();
    fixture.load(4);
}

#[test]
fn a_run_tells_how_long_its_checkpoints_kept_it_waiting() {
    let workplace = Workplace::new();
    let run = workplace.run("run");
    train(&args(
        &workplace.data,
        &run,
        "--steps 5 --checkpoint-every 2",
    ))
    .unwrap();
    let mut pauses = Vec::new();
    for entry in fs::read_dir(&run).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains(".tfevents.") {
            let points = read_events(&path).unwrap().scalars.into_iter();
            pauses.extend(points.filter(|point| point.tag == "checkpoint/pause_seconds"));
        }
    }
    let steps: Vec<_> = pauses.iter().map(|point| point.step).collect();
    // Every second, the last and the one of the validation loss, which falls, at step 4.
    assert_eq!(steps, [2, 4, 5]);
    let longest = pauses.iter().map(|point| point.value).fold(0.0, f32::max);
    assert!(longest > 0.0);
    assert_eq!(
        summary(&run)["checkpoint_pause_s"].as_f64().unwrap() as f32,
        longest
    );
}

/// Runs the trainer where no file may grow beyond some 100 KB: less than a checkpoint's have, and more
/// than all others.
#[cfg(unix)]
fn start_on_a_full_disk(workplace: &Workplace, run: &Path, more: &str) -> Output {
    Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; ulimit -f 128; exec "$0" "$@""#])
        .arg(env!("CARGO_BIN_EXE_flamia-train"))
        .args(args(&workplace.data, run, more))
        .output()
        .unwrap()
}

#[cfg(unix)]
#[test]
fn a_full_disk_ends_the_run_with_a_reason_and_it_goes_on_when_there_is_room() {
    let workplace = Workplace::new();
    let flags = "--steps 12 --checkpoint-every 4";
    train(&args(&workplace.data, &workplace.run("whole"), flags)).unwrap();
    let run = workplace.run("run");
    let more = "--steps 4 --checkpoint-every 4 --optim-warmup 2";
    let output = start_on_a_full_disk(&workplace, &workplace.run("short"), more);
    let told = String::from_utf8_lossy(&output.stderr);
    // The last state cannot be saved: that is no success.
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("error: cannot write"), "{told}");
    assert!(told.contains("model.safetensors"), "{told}");
    assert!(!workplace.run("short").join("summary.json").exists());

    // One that was to do more stops: at the next checkpoint if not before.
    let output = start_on_a_full_disk(&workplace, &run, flags);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("error: cannot write"), "{told}");
    assert!(!told.contains("step 12/12"), "{told}");
    let left = checkpoints(&run);
    assert!(left.iter().all(|name| name.starts_with('.')), "{left:?}");

    let resumed = format!("{flags} --resume");
    train(&args(&workplace.data, &run, &resumed)).unwrap();
    assert!(saved_tensors(&run, 12) == saved_tensors(&workplace.run("whole"), 12));
    assert!(checkpoints(&run).iter().all(|name| !name.starts_with('.')));
}
