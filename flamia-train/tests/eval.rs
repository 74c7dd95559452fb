//! Evaluating a checkpoint: the trainer's own number, exact attention beside it, and what is refused.
#![cfg(feature = "torch")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use clap::Parser;
use common::run::{Workplace, args, summary, texts, train, write_texts, write_word_tokenizer};
use flamia_train::checkpoint::CheckpointError;
use flamia_train::commands::EvalArgs;
use flamia_train::error::{TrainError, chain};
use flamia_train::leak_test::{LeakTest, LeakTestError};
use flamia_train::run_folder::RunFolder;
use flamia_train::saved::SavedError;
use flamia_train::tensorboard::read_events;

fn trained(workplace: &Workplace, more: &str) -> std::path::PathBuf {
    let run = workplace.run("run");
    train(&args(&workplace.data, &run, more)).unwrap();
    run
}

/// The result, and what was noted meanwhile.
fn eval(path: &Path, more: &str) -> (Result<LeakTest, LeakTestError>, String) {
    let path = [path.as_os_str()].into_iter();
    let more: Vec<_> = more.split_whitespace().map(AsRef::as_ref).collect();
    let args = EvalArgs::parse_from(["eval".as_ref()].into_iter().chain(path).chain(more));
    let mut notes = String::new();
    let result = LeakTest::run(&args, &mut |note| notes += &format!("{note}\n"));
    (result, notes)
}

fn found(path: &Path, more: &str) -> LeakTest {
    eval(path, more).0.unwrap()
}

fn refused(path: &Path, more: &str) -> LeakTestError {
    eval(path, more).0.unwrap_err()
}

/// Turns a bit in the middle of the file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn the_loss_is_the_trainers_and_exact_attention_stands_beside_it() {
    let workplace = Workplace::new();
    let more =
        "--attention mxfp8 --steps 12 --checkpoint-every 4 --checkpoint-keep 9 --optim-lr 1e-2";
    let run = trained(&workplace, more);
    // Another process may be training the run.
    let _busy = RunFolder::open(&run).unwrap();
    let result = found(&run, "");
    assert_eq!(result.step, 12);
    assert_eq!(result.kernel.attention.to_string(), "mxfp8");
    assert_eq!(result.exact.attention.to_string(), "reference");
    assert_eq!(
        Some(result.kernel.nats_per_byte),
        summary(&run)["val_loss"].as_f64()
    );
    assert_eq!(result.changes, [""; 0]);

    // Bytes, and an end of document each: a few more tokens than bytes.
    assert!(result.tokens > result.bytes && result.bytes > 0);
    let per_token = result.kernel.nats_per_byte * result.bytes as f64 / result.tokens as f64;
    assert!((result.kernel.nats_per_token - per_token).abs() < 1e-9);
    assert!((result.exact.perplexity.ln() - result.exact.nats_per_token).abs() < 1e-9);

    // Low bits cost little, but something; and they do not leak.
    let difference = result.kernel.nats_per_token - result.exact.nats_per_token;
    assert_eq!(result.difference, difference);
    assert!(difference != 0.0 && difference.abs() < 0.02, "{result:?}");
    assert!(!result.leaks && result.standard_error.is_some());
    // torch's exact attention agrees with the reference, and the reference with itself.
    let torchs = found(&run, "--exact sdpa");
    assert!((torchs.exact.nats_per_token - result.exact.nats_per_token).abs() < 1e-5);
    let twice = found(&run, "--attention reference");
    assert_eq!(twice.kernel, result.exact);
    assert_eq!(twice.difference, 0.0);
    assert_eq!(
        twice.changes,
        [r#"attention was "mxfp8" and is now "reference""#]
    );

    // Each checkpoint has the loss that was logged at its step.
    let logged: BTreeMap<i64, f32> = fs::read_dir(&run)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().contains(".tfevents."))
        .flat_map(|path| read_events(&path).unwrap().scalars)
        .filter(|point| point.tag == "val/loss")
        .map(|point| (point.step, point.value))
        .collect();
    for step in [4, 8] {
        let result = found(&run.join(format!("checkpoints/step-{step:06}")), "");
        assert_eq!(result.step, step as u64);
        assert_eq!(result.kernel.nats_per_byte as f32, logged[&step]);
    }
    assert_ne!(logged[&4], logged[&8]);
}

#[test]
fn other_rows_other_data_and_other_settings_are_named() {
    let workplace = Workplace::new();
    let run = trained(&workplace, "--steps 2");
    let other = workplace.run("other.parquet");
    write_texts(&other, &texts(90)[10..]);
    let more = format!(
        "--data {} --rows 3 -- --kernel-window 9 --eval-fraction 0.5",
        other.display()
    );
    let result = found(&run, &more);
    let table = result.table();
    for named in [
        "eval.rows was 4 and is now 3",
        "eval.fraction was 0.2 and is now 0.5",
        "kernel.window was 0 and is now 9",
        "data was ",
        "the data's documents are not those of the run",
    ] {
        assert!(table.contains(named), "{named}\n{table}");
    }
    assert_eq!(result.changes.len(), 5, "{table}");
    // Exact attention slides the same window.
    assert!(result.difference.abs() < 1e-5, "{table}");
}

#[test]
fn what_cannot_be_evaluated_is_told() {
    let workplace = Workplace::new();
    let run = trained(
        &workplace,
        "--steps 4 --checkpoint-every 2 --checkpoint-keep 9 --checkpoint-best false",
    );
    let nowhere = workplace.run("nowhere");
    for path in [nowhere.as_path(), &run.join("checkpoints"), &workplace.data] {
        let error = refused(path, "");
        let is_told = matches!(&error, LeakTestError::Saved(SavedError::NoRun { path: told }) if told == path);
        assert!(is_told, "{error}");
    }

    let unsaved = workplace.run("unsaved");
    fs::create_dir(&unsaved).unwrap();
    fs::copy(run.join("settings.toml"), unsaved.join("settings.toml")).unwrap();
    let error = refused(&unsaved, "");
    assert!(
        matches!(error, LeakTestError::Saved(SavedError::NoCheckpoint { .. })),
        "{error}"
    );

    // Settings that make another model, and other ids.
    let error = chain(&refused(&run, "-- --model-layers 3"));
    assert!(error.contains("model.layers.2."), "{error}");
    let tokenizer = workplace.run("tokenizer.json");
    write_word_tokenizer(&tokenizer);
    let error = refused(&run, &format!("--tokenizer {}", tokenizer.display()));
    assert!(
        matches!(error, LeakTestError::Saved(SavedError::Tokenizer { .. })),
        "{error}"
    );
    assert!(chain(&error).contains("give --tokenizer"), "{error}");

    // A damaged newest checkpoint is passed over with a warning; one that was asked for is an error.
    let newest = run.join("checkpoints/step-000004");
    damage(&newest.join("model.safetensors"));
    let (result, notes) = eval(&run, "");
    assert_eq!(result.unwrap().step, 2);
    assert!(
        notes.contains("warning: skipped ") && notes.contains("step-000004"),
        "{notes}"
    );
    let error = refused(&newest, "");
    let LeakTestError::Saved(SavedError::Train(error)) = error else {
        panic!("{error}");
    };
    assert!(
        matches!(
            *error,
            TrainError::Checkpoint(CheckpointError::Damaged { .. })
        ),
        "{error}"
    );
    damage(&run.join("checkpoints/step-000002/state.json"));
    let error = chain(&refused(&run, ""));
    assert!(error.starts_with("no whole checkpoint in "), "{error}");
}

#[test]
fn the_program_prints_json_for_programs() {
    let workplace = Workplace::new();
    let run = trained(&workplace, "--steps 2");
    let program = |flags: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_flamia-eval"))
            .arg(&run)
            .args(flags)
            .output()
            .unwrap()
    };
    let output = program(&["--json"]);
    assert!(output.status.success());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["kernel"]["attention"], "sdpa");
    assert_eq!(json["kernel"]["nats_per_byte"], summary(&run)["val_loss"]);
    assert_eq!(json["leaks"], false);

    let output = program(&["--device", "cuda:77"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.starts_with("error: device cuda:77 "), "{told}");
}
