//! Keeping, finding and refusing checkpoints.
#![cfg(feature = "torch")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{ADAMW, model, state, tiny_shape};
use flamia_train::checkpoint::{CheckpointError, Checkpoints, TrainState};
use flamia_train::model::Model;
use flamia_train::optim::AdamW;

struct Fixture {
    run: tempfile::TempDir,
    checkpoints: Checkpoints,
    model: Model,
    optimizer: AdamW,
}

impl Fixture {
    fn new(keep_last: usize) -> Self {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(run.path(), keep_last).unwrap();
        let model = model(tiny_shape(), 1);
        let optimizer = AdamW::new(ADAMW, &model.params).unwrap();
        Self {
            run,
            checkpoints,
            model,
            optimizer,
        }
    }

    fn save(&self, state: &TrainState) -> PathBuf {
        self.checkpoints
            .save(state, &self.model.params, &self.optimizer)
            .unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.run.path().join("checkpoints")).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn the_last_ones_and_the_best_are_kept() {
    let fixture = Fixture::new(2);
    let losses = [5.0, 3.0, 4.0, 4.5, 4.25];
    let mut state = state(0);
    for (step, loss) in (1..).zip(losses) {
        state.step = step;
        state.validation.record(step, loss);
        fixture.save(&state);
    }
    assert_eq!(
        fixture.names(),
        ["step-000002", "step-000004", "step-000005"]
    );
    assert_eq!(state.validation.first, Some(5.0));
}

type Damage = fn(&Path);

#[test]
fn a_damaged_checkpoint_is_passed_over_with_the_reason() {
    let truncate: Damage = |step| {
        let path = step.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
    };
    let flip: Damage = |step| {
        let path = step.join("optimizer.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let lose_state: Damage = |step| fs::remove_file(step.join("state.json")).unwrap();
    let lose_manifest: Damage = |step| fs::remove_file(step.join("MANIFEST.json")).unwrap();
    for (damage, told) in [
        (truncate, "bytes instead of"),
        (flip, "SHA-256"),
        (lose_state, "state.json"),
        (lose_manifest, "MANIFEST.json"),
    ] {
        let fixture = Fixture::new(2);
        let whole = fixture.save(&state(1));
        damage(&fixture.save(&state(2)));
        let newest = fixture.checkpoints.newest().unwrap();
        assert_eq!(newest.whole, Some(whole.clone()));
        assert!(
            newest.skipped[0].reason.contains(told),
            "{}",
            newest.skipped[0].reason
        );

        // Going on replaces it, and its presence costs no whole checkpoint its place.
        fixture.save(&state(2));
        assert!(fixture.checkpoints.newest().unwrap().skipped.is_empty());
        damage(&whole);
        damage(&fixture.run.path().join("checkpoints/step-000002"));
        let error = fixture.checkpoints.newest().unwrap_err();
        assert!(matches!(&error, CheckpointError::NoneWhole { skipped, .. } if skipped.len() == 2));
        assert!(error.to_string().contains("step-000001"), "{error}");
    }
}

#[test]
fn a_later_damaged_checkpoint_crowds_out_no_whole_one() {
    let fixture = Fixture::new(1);
    let later = fixture.save(&state(9));
    fs::remove_file(later.join("MANIFEST.json")).unwrap();
    let saved = fixture.save(&state(8));
    assert_eq!(fixture.checkpoints.newest().unwrap().whole, Some(saved));
}

#[test]
fn leftovers_of_killed_saves_are_cleared_away() {
    let fixture = Fixture::new(1);
    let saved = fixture.save(&state(1));
    let left = fixture
        .run
        .path()
        .join("checkpoints/.unfinished-step-000002");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("model.safetensors"), "half").unwrap();
    assert_eq!(
        fixture.checkpoints.newest().unwrap().whole,
        Some(saved),
        "it is no checkpoint"
    );
    Checkpoints::open(fixture.run.path(), 1).unwrap();
    assert_eq!(fixture.names(), ["step-000001"]);
}

#[test]
fn a_save_that_fails_leaves_the_earlier_one() {
    let fixture = Fixture::new(1);
    let saved = fixture.save(&state(1));
    // A file where the next save wants its folder.
    fs::write(
        fixture
            .run
            .path()
            .join("checkpoints/.unfinished-step-000002"),
        "",
    )
    .unwrap();
    let outcome = fixture
        .checkpoints
        .save(&state(2), &fixture.model.params, &fixture.optimizer);
    let error = outcome.unwrap_err();
    assert!(error.to_string().contains("step-000002"), "{error}");
    assert_eq!(fixture.checkpoints.newest().unwrap().whole, Some(saved));
}

#[test]
fn a_state_from_before_there_were_guard_rails_can_be_read() {
    let mut json = serde_json::to_value(state(3)).unwrap();
    assert!(json.as_object_mut().unwrap().remove("guard").is_some());
    let read: TrainState = serde_json::from_value(json).unwrap();
    assert_eq!(read, state(3));
}
