//! Shards and tokenizers that the tests write for themselves.

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use datasets::source::Record;
use datasets::{
    Dataset, DatasetError, OpenOptions, ParquetError, ParquetReader, Selection, Tokenizer,
};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Writes columns to `folder/name`.
pub fn write(
    folder: &Path,
    name: &str,
    columns: Vec<(&str, ArrayRef)>,
    properties: WriterProperties,
) -> PathBuf {
    let path = folder.join(name);
    let columns = columns
        .into_iter()
        .map(|(name, column)| (name, column, true));
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let file = File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    path
}

/// A plain shard of these texts.
pub fn write_texts(folder: &Path, name: &str, texts: &[impl AsRef<str>]) -> PathBuf {
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    write(
        folder,
        name,
        vec![("text", texts)],
        WriterProperties::default(),
    )
}

pub fn read(path: &Path) -> Result<Vec<Record>, ParquetError> {
    ParquetReader::open(path, &Selection::default())?.collect()
}

pub fn read_texts(path: &Path) -> Result<Vec<Option<String>>, ParquetError> {
    Ok(read(path)?.into_iter().map(|record| record.text).collect())
}

/// A dataset and the folder that its cache is in.
pub struct Opened {
    pub dataset: Dataset,
    _folder: TempDir,
}

impl Deref for Opened {
    type Target = Dataset;

    fn deref(&self) -> &Dataset {
        &self.dataset
    }
}

/// Options whose cache is in `folder`.
pub fn options(folder: &Path, row_tokens: usize) -> OpenOptions {
    OpenOptions {
        cache_dir: folder.join("cache"),
        seed: 7,
        ..OpenOptions::new(row_tokens)
    }
}

/// A byte-level dataset of these texts.
pub fn open_texts(
    texts: &[impl AsRef<str>],
    row_tokens: usize,
    validation_fraction: f64,
) -> Result<Opened, DatasetError> {
    open_texts_with(texts, |options| {
        options.row_tokens = row_tokens;
        options.validation_fraction = validation_fraction;
    })
}

/// A byte-level dataset of these texts, with these changes to the options.
pub fn open_texts_with(
    texts: &[impl AsRef<str>],
    change: impl FnOnce(&mut OpenOptions),
) -> Result<Opened, DatasetError> {
    let folder = tempfile::tempdir().unwrap();
    let path = write_texts(folder.path(), "texts.parquet", texts);
    let mut options = options(folder.path(), 64);
    change(&mut options);
    Ok(Opened {
        dataset: Dataset::open(&[path], Tokenizer::byte_level(), options)?,
        _folder: folder,
    })
}

/// Saves a tokenizer.json.
pub fn write_json(folder: &Path, tokenizer: &Value) -> PathBuf {
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    path
}

/// A tokenizer.json with this model, these control tokens, and everything switched on that the
/// loader must switch off.
pub fn tokenizer_json(model: Value, pre_tokenizer: Value, control: &[(&str, u32, bool)]) -> Value {
    let added = control.iter().map(|(content, id, special)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": special})
    });
    let (first, id, _) = control[0];
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": first},
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {first: {"id": first, "ids": [id], "tokens": [first]}}
        },
        "decoder": null,
        "model": model,
    })
}

/// GPT-2's scheme without merges: 256 byte tokens, ids in the order of GPT-2's alphabet.
pub fn byte_bpe(control: &[(&str, u32, bool)]) -> Value {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let others = (0..256).filter(|byte| !printable(byte)).count() as u32;
    let alphabet = (0..256).filter(printable).chain(256..256 + others);
    let mut vocab: serde_json::Map<String, Value> = alphabet
        .enumerate()
        .map(|(id, letter)| (char::from_u32(letter).unwrap().to_string(), json!(id)))
        .collect();
    vocab.extend(
        control
            .iter()
            .map(|&(content, id, _)| (content.to_owned(), json!(id))),
    );
    let model = json!({"type": "BPE", "dropout": 0.5, "unk_token": null,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
        "byte_fallback": false, "vocab": vocab, "merges": []});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    let mut json = tokenizer_json(model, bytes.clone(), control);
    json["decoder"] = bytes;
    json
}

/// Words separated by white space, by their place in the list.
pub fn word_level(words: &[String], control: &[(&str, u32, bool)]) -> Value {
    let vocab: serde_json::Map<String, Value> = words
        .iter()
        .enumerate()
        .map(|(id, word)| (word.clone(), json!(id)))
        .collect();
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": words[0]});
    tokenizer_json(model, json!({"type": "WhitespaceSplit"}), control)
}
