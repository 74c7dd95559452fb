//! Whole runs of a tiny model: what they learn, leave and refuse.
#![cfg(feature = "torch")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::run::{
    Workplace, args, checkpoints, saved_tensors, summary, texts, train, write_texts,
};
use flamia_train::error::{TrainError, chain};
use flamia_train::run_folder::RunFolderError;
use flamia_train::tensorboard::read_events;
use flamia_train::trainer::Outcome;

impl Workplace {
    fn train(&self, name: &str, more: &str) -> Result<Outcome, TrainError> {
        train(&args(&self.data, &self.run(name), more))
    }

    /// A run as if `source` had been killed right after saving `step`.
    fn killed_after(&self, source: &str, step: u64, name: &str) {
        let checkpoint = format!("checkpoints/step-{step:06}");
        let (from, to) = (self.run(source), self.run(name));
        fs::create_dir_all(to.join(&checkpoint)).unwrap();
        fs::copy(from.join("settings.toml"), to.join("settings.toml")).unwrap();
        for entry in fs::read_dir(from.join(&checkpoint)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(&checkpoint).join(entry.file_name())).unwrap();
        }
    }
}

/// All points of the run's event files, by curve.
fn curves(run: &Path) -> BTreeMap<String, Vec<(i64, f32)>> {
    let mut curves: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for entry in fs::read_dir(run).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains(".tfevents.") {
            for point in read_events(&path).unwrap().scalars {
                curves
                    .entry(point.tag)
                    .or_default()
                    .push((point.step, point.value));
            }
        }
    }
    curves
}

#[test]
fn a_run_learns_and_leaves_its_results() {
    let workplace = Workplace::new();
    let outcome = workplace.train("run", "--steps 20 --optim-lr 1e-2 --checkpoint-every 6");
    assert_eq!(outcome.unwrap(), Outcome::Finished);
    let run = workplace.run("run");

    let summary = summary(&run);
    let loss = |name: &str| summary[name].as_f64().unwrap();
    // 259 ids, of which text needs one byte each: an untrained model is near ln 259 = 5.56.
    assert!((5.3..6.2).contains(&loss("val_loss_first")), "{summary}");
    assert!(loss("val_loss") < 3.2, "{summary}");
    assert!(loss("train_loss") < 3.2, "{summary}");
    assert_eq!(summary["steps"], 20);
    assert_eq!(summary["attention"], "sdpa");
    assert_eq!(summary["settings"]["optim"]["lr"], 1e-2);
    assert!(loss("tokens_per_s") > 0.0);
    assert_eq!(checkpoints(&run).last().unwrap(), "step-000020");
    assert!(run.join("loss.svg").exists());

    let curves = curves(&run);
    let steps = |tag: &str| curves[tag].iter().map(|point| point.0).collect::<Vec<_>>();
    assert_eq!(steps("train/loss"), (1..=20).collect::<Vec<_>>());
    assert_eq!(steps("val/loss"), [0, 4, 8, 12, 16, 20]);
    assert_eq!(curves["val/loss"][0].1, loss("val_loss_first") as f32);
    assert_eq!(curves["val/loss"][5].1, loss("val_loss") as f32);
    assert_eq!(curves["train/lr"][1], (2, 1e-2));
    assert!(curves["train/grad_norm"].iter().all(|point| point.1 > 0.0));
    assert!(
        curves["data/padding_share"]
            .iter()
            .all(|point| (0.0..1.0).contains(&point.1))
    );
    assert!(
        curves["data/longest_document"]
            .iter()
            .all(|point| point.1 <= 64.0)
    );
    assert!(
        curves["data/documents_per_row"]
            .iter()
            .any(|point| point.1 > 1.0)
    );
}

/// TRN-04 and DAT-09 through the whole trainer: two micro-batches a step, resumed in the middle of
/// an epoch and beyond its end, twice.
#[test]
fn a_resumed_run_ends_with_the_same_bits() {
    for attention in ["sdpa", "mxfp8", "fp4"] {
        let workplace = Workplace::new();
        let flags =
            format!("--attention {attention} --steps 24 --checkpoint-every 5 --checkpoint-keep 9");
        workplace.train("whole", &flags).unwrap();
        let whole = workplace.run("whole");
        let state = fs::read(whole.join("checkpoints/step-000024/state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        let epoch = state["data"]["epoch"].as_u64().unwrap();
        assert!(epoch >= 1, "the run crosses no epoch's end");
        assert_ne!(state["data"]["row"], 0);

        for step in [5, 10, 20] {
            let name = format!("from {step}");
            workplace.killed_after("whole", step, &name);
            workplace
                .train(&name, &format!("{flags} --resume"))
                .unwrap();
            let resumed = workplace.run(&name);
            let same = saved_tensors(&resumed, 24) == saved_tensors(&whole, 24);
            assert!(same, "{attention}, {name}: other bits");
            for value in [
                "val_loss_first",
                "val_loss",
                "val_loss_best",
                "train_loss",
                "tokens",
            ] {
                let (resumed, whole) = (summary(&resumed), summary(&whole));
                assert_eq!(resumed[value], whole[value], "{attention}, {name}: {value}");
            }
        }
    }
}

#[test]
fn an_mxfp8_run_shows_what_quantisation_did_in_each_layer() {
    let workplace = Workplace::new();
    // Wide weights, so that scores are uneven and some of dS is small beside the rest.
    workplace
        .train("run", "--attention mxfp8 --steps 3 --model-init-std 0.3")
        .unwrap();
    let curves = curves(&workplace.run("run"));
    for layer in 0..2 {
        let flushed = &curves[&format!("attention/layer{layer}/ds_flush_fraction")];
        assert_eq!(flushed.len(), 3);
        assert!(flushed.iter().any(|point| point.1 > 0.0), "{flushed:?}");
        assert!(flushed.iter().all(|point| point.1 < 0.5), "{flushed:?}");
        let saturated = &curves[&format!("attention/layer{layer}/saturated")];
        assert!(
            saturated.iter().all(|point| point.1 == 0.0),
            "{saturated:?}"
        );
    }
}

#[test]
fn a_finished_run_can_be_given_more_steps() {
    let workplace = Workplace::new();
    workplace.train("run", "--steps 4").unwrap();
    workplace.train("run", "--steps 6 --resume").unwrap();
    assert_eq!(summary(&workplace.run("run"))["steps"], 6);
    let error = workplace.train("run", "--steps 5 --resume").unwrap_err();
    assert!(
        matches!(error, TrainError::FewerSteps { done: 6, asked: 5 }),
        "{error}"
    );
}

#[test]
fn a_resumed_run_cannot_change_what_its_result_depends_on() {
    let workplace = Workplace::new();
    workplace.train("run", "--steps 2").unwrap();
    let error = workplace
        .train("run", "--steps 4 --seed 1 --optim-clip 2 --resume")
        .unwrap_err();
    let told = chain(&error);
    assert!(told.contains("seed was 0 and is now 1"), "{told}");
    assert!(told.contains("optim.clip was 1.0 and is now 2.0"), "{told}");

    // Nor can its data, wherever it lies.
    let elsewhere = tempfile::tempdir().unwrap();
    let moved = elsewhere.path().join("moved.parquet");
    fs::copy(&workplace.data, &moved).unwrap();
    let resume = |data: &Path| train(&args(data, &workplace.run("run"), "--steps 4 --resume"));
    resume(&moved).unwrap();
    let other = elsewhere.path().join("other.parquet");
    write_texts(&other, &texts(61));
    let error = resume(&other).unwrap_err();
    assert!(chain(&error).contains("the text of the data"), "{error}");
}

#[test]
fn a_new_run_takes_no_used_folder() {
    let workplace = Workplace::new();
    workplace
        .train("run", "--steps 1 --optim-warmup 0")
        .unwrap();
    let before = saved_tensors(&workplace.run("run"), 1);
    let error = workplace
        .train("run", "--steps 1 --optim-warmup 0")
        .unwrap_err();
    assert!(
        matches!(
            error,
            TrainError::RunFolder(RunFolderError::Occupied { .. })
        ),
        "{error}"
    );
    assert_eq!(saved_tensors(&workplace.run("run"), 1), before);
    let error = workplace
        .train("nothing", "--steps 1 --optim-warmup 0 --resume")
        .unwrap_err();
    assert!(
        matches!(error, TrainError::RunFolder(RunFolderError::NoRun { .. })),
        "{error}"
    );
}

#[test]
fn a_resumed_run_cannot_change_its_numerics() {
    let workplace = Workplace::new();
    workplace.train("run", "--attention fp4 --steps 2").unwrap();
    for (change, told) in [
        (
            "--kernel-dk-rounding nearest",
            "kernel.dk_rounding was \"auto\" and is now \"nearest\"",
        ),
        ("--kernel-exact", "kernel.exact was false and is now true"),
        (
            "--kernel-ablate p4-forward",
            "kernel.ablate was \"none\" and is now \"p4-forward\"",
        ),
        ("--kernel-window 9", "kernel.window was 0 and is now 9"),
    ] {
        let flags = format!("--attention fp4 --steps 4 --resume {change}");
        let error = chain(&workplace.train("run", &flags).unwrap_err());
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn a_defect_is_warned_of_and_written_down() {
    let workplace = Workplace::new();
    let started = |name: &str, more: &str| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_flamia-train"))
            .args(args(&workplace.data, &workplace.run(name), more))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let flags = "--attention mxfp8 --steps 2 --optim-warmup 0";
    let told = started("run", &format!("{flags} --kernel-ablate unquantised-d"));
    let warning = "warning: `ablate = unquantised-d` makes attention wrong on purpose";
    assert_eq!(told.matches(warning).count(), 1, "{told}");
    let defective = summary(&workplace.run("run"));
    assert_eq!(defective["ablate"], "unquantised-d");
    assert_eq!(defective["settings"]["kernel"]["ablate"], "unquantised-d");
    let saved = fs::read_to_string(workplace.run("run").join("settings.toml")).unwrap();
    assert!(saved.contains("ablate = \"unquantised-d\""), "{saved}");

    let told = started("matched", flags);
    assert!(!told.contains("warning"), "{told}");
    let matched = summary(&workplace.run("matched"));
    assert_eq!(matched["ablate"], "none");
    // It did something.
    assert_ne!(matched["train_loss"], defective["train_loss"]);
}

#[test]
fn stochastic_rounding_follows_the_seed() {
    let workplace = Workplace::new();
    let weights = |name: &str, more: &str| {
        let flags = format!("--attention fp4 --steps 2 --optim-warmup 0 {more}");
        workplace.train(name, &flags).unwrap();
        saved_tensors(&workplace.run(name), 2)
    };
    let first = weights("a", "");
    assert!(first == weights("b", ""));
    let nearest = weights("c", "--kernel-dk-rounding nearest");
    assert!(first != nearest);
}
