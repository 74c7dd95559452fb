//! Steps that are not finite, and jumps of the loss: left out, counted, reported, and in the end a stop.
#![cfg(feature = "torch")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::run::{args, checkpoints, saved_tensors, summary, texts, train, write_texts};
use datasets::Position;
use flamia_train::checkpoint::Checkpoints;
use flamia_train::curves::{Curve, read_curves};
use flamia_train::error::{TrainError, chain};
use flamia_train::parts::Parts;
use flamia_train::settings::Settings;
use serde_json::Value;
use tch::no_grad;

/// A folder with a shard of the usual texts and `more`.
struct Place {
    folder: tempfile::TempDir,
    data: PathBuf,
}

impl Place {
    fn new(more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("corpus.parquet");
        let mut texts = texts(60);
        texts.extend(more.iter().map(|text| text.to_string()));
        write_texts(&data, &texts);
        Self { folder, data }
    }

    fn run(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn train(&self, name: &str, more: &str) -> Result<(), TrainError> {
        train(&args(&self.data, &self.run(name), more)).map(drop)
    }
}

fn state(run: &Path, step: u64) -> Value {
    let path = run.join(format!("checkpoints/step-{step:06}/state.json"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The reports of `run`, by step.
fn reports(run: &Path) -> BTreeMap<u64, Value> {
    let Ok(entries) = fs::read_dir(run.join("spikes")) else {
        return BTreeMap::new();
    };
    let report = |path: PathBuf| {
        let report: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let step = report["step"].as_u64().unwrap();
        assert_eq!(path.file_name().unwrap(), &*format!("step-{step:06}.json"));
        (step, report)
    };
    entries.map(|entry| report(entry.unwrap().path())).collect()
}

#[test]
fn too_many_steps_in_a_row_that_are_not_finite_stop_the_run_with_the_last_good_state_saved() {
    let place = Place::new(&[]);
    let flags = "--steps 9 --optim-lr 1e30 --guard-skip-limit 3 --checkpoint-every 1 \
        --checkpoint-keep 9";
    let error = place.train("run", flags).unwrap_err();
    assert!(
        matches!(
            error,
            TrainError::NotFinite {
                step: 4,
                in_a_row: 3,
                saved: 4
            }
        ),
        "{error}"
    );
    let told = chain(&error);
    assert!(told.contains("lower optim.lr"), "{told}");
    let run = place.run("run");
    // The first step's update spoils the weights; the others are left out, moments and all.
    let good = saved_tensors(&run, 1);
    for step in 2..=4 {
        assert!(saved_tensors(&run, step) == good, "step {step}");
        assert_eq!(state(&run, step)["guard"]["skipped"], step - 1);
    }
    assert_eq!(checkpoints(&run).last().unwrap(), "step-000004");
    let curves = read_curves(&run, 9).unwrap();
    assert_eq!(
        curves["train/skipped_steps"],
        [(1.0, 0.0), (2.0, 1.0), (3.0, 2.0)]
    );
    assert_eq!(curves["train/loss"].len(), 1, "NaN is no point of a curve");

    // Going on, the run has as many again. The first in a row has its report.
    let resumed = format!("{flags} --resume");
    let error = place.train("run", &resumed).unwrap_err();
    assert!(
        matches!(
            error,
            TrainError::NotFinite {
                step: 7,
                in_a_row: 3,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(state(&run, 7)["guard"]["skipped"], 6);
    let reports = reports(&run);
    assert_eq!(reports.keys().copied().collect::<Vec<_>>(), [2, 5]);
    for report in reports.values() {
        assert_eq!(report["reasons"], serde_json::json!(["not finite"]));
    }
}

/// A run whose input embedding of `Z` is NaN from its first step on: a step is not finite if and only if its
/// rows have a `Z`.
fn with_a_poisoned_letter(place: &Place, name: &str) {
    place
        .train(name, "--steps 1 --optim-warmup 0 --model-tied false")
        .unwrap();
    let run = place.run(name);
    let settings = Settings::load_resuming(&run.join("settings.toml"), [], []).unwrap();
    let parts = Parts::new(&settings).unwrap();
    let (model, mut optimizer) = parts.model(&settings).unwrap();
    let checkpoints = Checkpoints::open(&run, 9).unwrap();
    let newest = checkpoints.newest().unwrap().whole.unwrap();
    let state = Checkpoints::load(&newest, &model.params, &mut optimizer).unwrap();
    let embedding = model.params.get("model.embed_tokens.weight");
    no_grad(|| drop(embedding.get(i64::from(b'Z')).fill_(f64::NAN)));
    checkpoints.save(&state, &model.params, &optimizer).unwrap();
}

#[test]
fn a_step_that_is_not_finite_is_left_out_reported_and_counted_over_resumptions() {
    let place = Place::new(&["Z is poison", "a Z within", "and one more: Z"]);
    let flags =
        "--checkpoint-every 5 --checkpoint-keep 9 --optim-warmup 0 --model-tied false --resume";
    for name in ["whole", "in parts"] {
        with_a_poisoned_letter(&place, name);
    }
    place
        .train("whole", &format!("--steps 24 {flags}"))
        .unwrap();
    // With the schedule of 24 steps, stopped by a kill after any of them.
    place
        .train("in parts", &format!("--steps 24 {flags}"))
        .unwrap();
    for step in [15, 20, 24] {
        fs::remove_dir_all(
            place
                .run("in parts")
                .join(format!("checkpoints/step-{step:06}")),
        )
        .unwrap();
    }
    place
        .train("in parts", &format!("--steps 24 {flags}"))
        .unwrap();

    let [whole, parts] = ["whole", "in parts"].map(|name| place.run(name));
    assert!(saved_tensors(&whole, 24) == saved_tensors(&parts, 24));
    let skipped = summary(&whole)["skipped_steps"].as_u64().unwrap();
    assert!((1..20).contains(&skipped), "{skipped}");
    assert_eq!(summary(&parts)["skipped_steps"], skipped);
    assert_eq!(state(&whole, 24)["guard"], state(&parts, 24)["guard"]);
    assert!(summary(&whole)["train_loss"].as_f64().unwrap() < 6.0);

    let found = reports(&whole);
    assert_eq!(reports(&parts), found);
    let settings = Settings::load_resuming(&whole.join("settings.toml"), [], []).unwrap();
    let dataset = Parts::new(&settings).unwrap().dataset;
    let mut not_finite = 0;
    for (step, report) in &found {
        let reasons = report["reasons"].as_array().unwrap();
        if !reasons.contains(&"not finite".into()) {
            continue;
        }
        not_finite += 1;
        assert_eq!(report["loss"]["value"], "NaN");
        let rows: Vec<&Value> = report["micro_batches"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|rows| rows.as_array().unwrap())
            .collect();
        assert_eq!(rows.len(), 4, "two micro-batches of two rows");
        let mut poisoned = false;
        for row in rows {
            // What the data has at that place, its bytes read here.
            let position = Position {
                epoch: row["epoch"].as_u64().unwrap(),
                row: row["row"].as_u64().unwrap(),
            };
            let (expected, _) = dataset.row_with_parts(position).unwrap();
            assert_eq!(row["tokens"], 64);
            assert_eq!(row["padding"], expected.padding);
            let documents = row["documents"].as_array().unwrap();
            let pieces = expected.cu_seqlens.len() - 1 - usize::from(expected.padding > 0);
            assert_eq!(documents.len(), pieces);
            for (document, bounds) in documents.iter().zip(expected.cu_seqlens.windows(2)) {
                assert_eq!(document["start"], bounds[0]);
                assert_eq!(document["end"], bounds[1]);
                let labels = &expected.labels[bounds[0] as usize..bounds[1] as usize];
                let bytes: Vec<u8> = labels
                    .iter()
                    .filter_map(|&id| u8::try_from(id).ok())
                    .collect();
                assert_eq!(document["text"], String::from_utf8(bytes).unwrap());
                assert_eq!(document["ends"], *labels.last().unwrap() == 257);
            }
            poisoned |= expected.tokens.contains(&i64::from(b'Z'));
        }
        assert!(poisoned, "step {step} has no Z");
    }
    assert!(not_finite > 0, "{found:?}");
}

const NOISE: &str = "q~X{7}|^J0%Z#@vB=?K]W&Y<\\9$U>`R!;G*N+H3E/6F";

/// The steps of `curve` that jump beyond the ones before them, by brute force.
fn jumps(curve: &Curve, window: usize, factor: f64) -> Vec<u64> {
    let median = |values: &[f64]| {
        let mut values = values.to_vec();
        values.sort_by(|a, b| a.partial_cmp(b).unwrap());
        (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
    };
    let is_jump = |i: &usize| {
        let before: Vec<f64> = curve[i - window..*i].iter().map(|point| point.1).collect();
        let center = median(&before);
        let off: Vec<f64> = before.iter().map(|x| (x - center).abs()).collect();
        curve[*i].1 > center + factor * median(&off).max(center / 1000.0)
    };
    (window..curve.len())
        .filter(is_jump)
        .map(|i| curve[i].0 as u64)
        .collect()
}

#[test]
fn a_loss_that_jumps_is_reported_with_its_documents_and_told_in_a_line() {
    let place = Place::new(&[NOISE, &NOISE.repeat(2)]);
    let start = |name: &str, more: &str| {
        let flags = format!(
            "--steps 60 --optim-lr 5e-3 --guard-spike-window 12 --guard-spike-factor 6 {more}"
        );
        let output = Command::new(env!("CARGO_BIN_EXE_flamia-train"))
            .args(args(&place.data, &place.run(name), &flags))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        (
            String::from_utf8(output.stderr).unwrap(),
            reports(&place.run(name)),
        )
    };
    let (told, found) = start("run", "");
    let curves = read_curves(&place.run("run"), 60).unwrap();
    let of_loss = jumps(&curves["train/loss"], 12, 6.0);
    let of_norm = jumps(&curves["train/grad_norm"], 12, 6.0);
    assert!(!of_loss.is_empty(), "no jump: the test shows nothing");
    let stand_out = |step: u64| of_loss.contains(&step) || of_norm.contains(&step);
    // A jump that lasts is one.
    let expected: Vec<u64> = (1..=60)
        .filter(|&step| stand_out(step) && !stand_out(step - 1))
        .collect();
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), expected);
    for (step, report) in &found {
        let reasons = report["reasons"].as_array().unwrap();
        assert_eq!(reasons.contains(&"loss".into()), of_loss.contains(step));
        assert_eq!(
            reasons.contains(&"grad_norm".into()),
            of_norm.contains(step)
        );
        let (loss, usual) = (&report["loss"]["value"], &report["loss"]["usual"]);
        let point = curves["train/loss"][*step as usize - 1];
        assert!((loss.as_f64().unwrap() - point.1).abs() < 1e-5);
        let jumped = loss.as_f64() > usual["threshold"].as_f64();
        assert_eq!(jumped, of_loss.contains(step));
        let path = place.run("run").join(format!("spikes/step-{step:06}.json"));
        let line = told
            .lines()
            .filter(|line| line.contains(&path.display().to_string()));
        assert_eq!(line.count(), 1, "{told}");
    }
    let noisy = |report: &&Value| report.to_string().contains("q~X{7}");
    let of_noise = of_loss.iter().filter_map(|step| found.get(step));
    assert!(of_noise.filter(noisy).count() > 0, "{found:?}");

    // No more than there may be: the newest.
    assert!(expected.len() > 1, "{expected:?}");
    let (told, last) = start("one", "--guard-spike-reports 1");
    let steps: Vec<u64> = last.keys().copied().collect();
    assert_eq!(steps, expected[expected.len() - 1..]);
    assert_eq!(
        told.matches("documents are in").count(),
        expected.len(),
        "{told}"
    );
    let (told, none) = start("none", "--guard-spike-reports 0");
    assert!(
        none.is_empty() && !told.contains("documents are in"),
        "{told}"
    );
    assert!(saved_tensors(&place.run("none"), 60) == saved_tensors(&place.run("run"), 60));
}
