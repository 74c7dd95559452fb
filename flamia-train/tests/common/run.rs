//! A tiny run through the whole trainer: its data, its flags, its results.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use flamia_train::error::TrainError;
use flamia_train::stop::Stop;
use flamia_train::trainer::{Outcome, Trainer};
use parquet::arrow::ArrowWriter;

/// The words of [`texts`].
pub const WORDS: [&str; 8] = [
    "the",
    "row",
    "keeps",
    "its",
    "documents",
    "apart",
    "and",
    "whole",
];

/// Short documents, some of them longer than a row of 64 tokens.
pub fn texts(count: usize) -> Vec<String> {
    (0..count)
        .map(|i| {
            let word = |j: usize| WORDS[(i * 5 + j * (i % 7 + 1)) % WORDS.len()];
            (0..3 + i % 19).map(word).collect::<Vec<_>>().join(" ")
        })
        .collect()
}

/// Writes a shard of `texts`.
pub fn write_texts(path: &Path, texts: &[String]) {
    let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut writer =
        ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// A folder with a shard of 60 short documents, in which runs have names.
pub struct Workplace {
    folder: tempfile::TempDir,
    pub data: PathBuf,
}

impl Workplace {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("corpus.parquet");
        write_texts(&data, &texts(60));
        Self { folder, data }
    }

    pub fn run(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// The flags of a tiny run, `more` last.
pub fn args(data: &Path, out: &Path, more: &str) -> Vec<OsString> {
    let flags = "--attention sdpa --device cpu --threads 1 --model-dim 32 --model-layers 2 \
        --model-heads 2 --model-kv-heads 1 --model-ffn-dim 64 --batch-row-tokens 64 --batch-rows 2 \
        --batch-accumulate 2 --optim-warmup 2 --eval-every 4 --eval-rows 4 --eval-fraction 0.2";
    let mut args: Vec<OsString> = flags.split_whitespace().map(OsString::from).collect();
    // A later flag of the same name would be refused as a repetition.
    for flag in more
        .split_whitespace()
        .filter(|flag| flag.starts_with("--"))
    {
        if let Some(i) = args.iter().position(|arg| arg == flag) {
            args.drain(i..i + 2);
        }
    }
    args.extend(["--data".into(), data.into(), "--out".into(), out.into()]);
    args.extend(more.split_whitespace().map(OsString::from));
    args
}

pub fn train(args: &[OsString]) -> Result<Outcome, TrainError> {
    Trainer::from_args(args, Stop::default())?.run()
}

/// Weights and moments of the checkpoint of `step`, as bytes.
pub fn saved_tensors(run: &Path, step: u64) -> [Vec<u8>; 2] {
    let folder = run.join(format!("checkpoints/step-{step:06}"));
    ["model.safetensors", "optimizer.safetensors"].map(|name| fs::read(folder.join(name)).unwrap())
}

pub fn summary(run: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap()
}

/// The names of the checkpoints of `run`, in order.
pub fn checkpoints(run: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(run.join("checkpoints")) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Writes a tokenizer.json whose ids are the words of [`texts`].
pub fn write_word_tokenizer(path: &Path) {
    let vocabulary: serde_json::Map<_, _> = (0..)
        .zip(["<s>", "</s>", "[UNK]"].into_iter().chain(WORDS))
        .map(|(id, word): (u32, _)| (word.to_string(), id.into()))
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    });
    fs::write(path, json.to_string()).unwrap();
}
