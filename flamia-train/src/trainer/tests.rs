//! Steps whose outcomes are read late, as on a GPU. Here on the CPU, with an optimiser that is told to guard
//! its steps.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use tch::no_grad;

use super::*;

/// A shard of 50 texts, one of which has a `Z`.
fn write_texts(path: &Path) {
    let text = |i: usize| match i {
        25 => "Z".to_string(),
        i => "the rows keep their documents apart "[i % 20..].repeat(1 + i % 3),
    };
    let column: ArrayRef = Arc::new(StringArray::from_iter_values((0..50).map(text)));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut writer =
        ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// A run of 80 steps in `out`, spoilt by `spoil`, whose outcomes are read at multiples of `log_every`.
fn run(
    data: &Path,
    out: &Path,
    log_every: usize,
    spoil: impl FnOnce(&Model),
) -> Result<Outcome, TrainError> {
    let flags = format!(
        "--attention sdpa --device cpu --model-dim 32 --model-layers 1 --model-heads 1 \
         --model-ffn-dim 64 --model-tied false --batch-row-tokens 64 --batch-rows 2 --steps 80 \
         --optim-warmup 2 --eval-rows 2 --eval-fraction 0.2 --guard-skip-limit 5 \
         --guard-spike-window 8 --guard-spike-factor 4 --log-every {log_every}"
    );
    let mut args: Vec<OsString> = flags.split_whitespace().map(OsString::from).collect();
    args.extend(["--data".into(), data.into(), "--out".into(), out.into()]);
    let settings = Settings::load_from(args, []).unwrap();
    let folder = RunFolder::create(out).unwrap();
    let mut trainer = Trainer::new(settings, folder, Stop::default())?;
    trainer.optimizer.guard();
    spoil(&trainer.model);
    trainer.run()
}

fn files(folder: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap()))
        .collect()
}

#[test]
fn steps_read_late_are_counted_and_reported_as_those_read_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("corpus.parquet");
    write_texts(&data);
    let poison_z = |model: &Model| {
        let embedding = model.params.get("model.embed_tokens.weight");
        no_grad(|| drop(embedding.get(i64::from(b'Z')).fill_(f64::NAN)));
    };
    let results = [1, 7, 1000].map(|log_every| {
        let out = folder.path().join(format!("every {log_every}"));
        run(&data, &out, log_every, poison_z).unwrap();
        let checkpoint = files(&out.join("checkpoints/step-000080"));
        let tensors = ["model.safetensors", "optimizer.safetensors"]
            .map(|name| checkpoint[&OsString::from(name)].clone());
        let state: TrainState =
            serde_json::from_slice(&checkpoint[&OsString::from("state.json")]).unwrap();
        (
            tensors,
            state.guard,
            state.train_loss,
            files(&out.join("spikes")),
        )
    });
    let (_, guard, _, reports) = &results[0];
    assert!(guard.skipped > 1, "{guard:?}");
    // Jumps besides the steps that were left out, all of them with their own rows.
    assert!(reports.len() as u64 > guard.skipped, "{:?}", reports.keys());
    for late in &results[1..] {
        assert!(*late == results[0]);
    }
}

#[test]
fn too_many_in_a_row_are_found_when_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("corpus.parquet");
    write_texts(&data);
    let poison_all = |model: &Model| {
        let gain = model.params.get("model.norm.weight");
        no_grad(|| drop(gain.shallow_clone().fill_(f64::NAN)));
    };
    for (log_every, saved) in [(1, 5), (7, 7), (1000, MOST_UNREAD as u64)] {
        let out = folder.path().join(format!("every {log_every}"));
        let error = run(&data, &out, log_every, poison_all).unwrap_err();
        let TrainError::NotFinite {
            step,
            in_a_row,
            saved: found,
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((step, in_a_row, found), (5, 5, saved));
        let newest = files(&out.join(format!("checkpoints/step-{saved:06}")));
        let state: TrainState =
            serde_json::from_slice(&newest[&OsString::from("state.json")]).unwrap();
        assert_eq!(state.guard.skipped, saved);
    }
}
