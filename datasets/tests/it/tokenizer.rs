//! Control tokens in raw text (report DAT-04) and wide ids (report DAT-06).

use std::path::Path;

use datasets::{Dataset, OpenOptions, SpecialIds, Tokenizer, TokenizerError};
use proptest::prelude::*;
use serde_json::json;
use tempfile::tempdir;

use crate::fixtures::{byte_bpe, options, word_level, write_json, write_texts};

const CONTROL: [(&str, u32, bool); 3] = [
    ("<|endoftext|>", 256, true),
    ("<s>", 257, false),
    ("</s>", 258, true),
];

fn from_json(json: &serde_json::Value, special: SpecialIds) -> Result<Tokenizer, TokenizerError> {
    let folder = tempdir().unwrap();
    Tokenizer::from_file(&write_json(folder.path(), json), special)
}

#[test]
fn bytes_are_their_own_ids() {
    let tokenizer = Tokenizer::byte_level();
    let ids = tokenizer.encode("aü<|endoftext|>").unwrap();
    assert_eq!(ids[..3], [97, 0xc3, 0xbc]);
    assert_eq!(ids.len(), 16);
    assert_eq!(
        (tokenizer.bos(), tokenizer.eos(), tokenizer.pad()),
        (256, 257, 258)
    );
    assert_eq!(tokenizer.vocab_size(), 259);
}

/// With padding, truncation, dropout and a template in the file, all switched off.
#[test]
fn control_tokens_in_raw_text_are_ordinary_text() {
    let tokenizer = from_json(&byte_bpe(&CONTROL), SpecialIds::default()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (257, 256));
    assert_eq!(tokenizer.vocab_size(), 259);
    let text = "about <|endoftext|> and <s>, </s>";
    let ids = tokenizer.encode(text).unwrap();
    assert_eq!(ids.len(), text.len(), "one id for each byte: {:?}", ids);
    // GPT-2's alphabet begins with `!` as 0.
    assert_eq!(ids[0], u32::from(b'a' - b'!'));
    assert!(ids.iter().all(|&id| id < 256));
}

#[test]
fn ids_become_the_text_again() {
    let tokenizers = [
        from_json(&byte_bpe(&CONTROL), SpecialIds::default()).unwrap(),
        Tokenizer::byte_level(),
    ];
    for tokenizer in tokenizers {
        for text in ["", " ", "aüb", "日本 語\n\n", "🦀🦀 \t x ", "<s> and </s>"] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(ids.len(), text.len());
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }
}

/// A BPE with merges, a normaliser and an added token that is no control token.
fn merging_bpe() -> serde_json::Value {
    let mut json = byte_bpe(&CONTROL);
    let pairs = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("Ġ", "a"),
        ("i", "n"),
        ("l", "l"),
    ];
    for (id, (left, right)) in (300..).zip(pairs) {
        json["model"]["vocab"][format!("{left}{right}")] = json!(id);
    }
    json["model"]["merges"] = json!(pairs.map(|(left, right)| format!("{left} {right}")));
    json["model"]["dropout"] = json!(null);
    json["normalizer"] = json!({"type": "NFC"});
    let added = json!({"id": 400, "content": "<url>", "single_word": false, "lstrip": true,
        "rstrip": false, "normalized": false, "special": false});
    json["added_tokens"].as_array_mut().unwrap().push(added);
    json
}

proptest! {
    #[test]
    fn ids_are_those_of_the_library(
        texts in prop::collection::vec("([a-it ]|the|in|<url>|\\s|u\u{308}|\\PC|<s>|[0-9]){0,60}", 1..8)
    ) {
        let json = merging_bpe();
        let ours = from_json(&json, SpecialIds::default()).unwrap();
        let mut library = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        library.with_truncation(None).unwrap();
        library.with_padding(None);
        library.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let marked = tokenizers::AddedToken::from("<s>", true);
        library.add_special_tokens([marked]).unwrap();
        library.set_encode_special_tokens(true);
        let expected: Vec<Vec<u32>> = texts
            .iter()
            .map(|text| library.encode(text.as_str(), false).unwrap().get_ids().to_vec())
            .collect();
        prop_assert_eq!(ours.encode_batch(&texts).unwrap(), expected.clone());
        // Once more, now that words are known.
        prop_assert_eq!(ours.encode_batch(&texts).unwrap(), expected);
    }
}

#[test]
fn the_identity_is_the_files_hash() {
    let folder = tempdir().unwrap();
    let path = write_json(folder.path(), &byte_bpe(&CONTROL));
    let first = Tokenizer::from_file(&path, SpecialIds::default()).unwrap();
    let mut other = std::fs::read(&path).unwrap();
    other.push(b'\n');
    std::fs::write(&path, other).unwrap();
    let second = Tokenizer::from_file(&path, SpecialIds::default()).unwrap();
    assert_eq!(first.sha256().len(), 64);
    assert_ne!(first.sha256(), second.sha256());
}

#[test]
fn special_ids_can_be_named() {
    let given = SpecialIds {
        bos: Some(258),
        eos: Some(258),
    };
    let tokenizer = from_json(&byte_bpe(&CONTROL), given).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (258, 258));
    let outside = SpecialIds {
        bos: None,
        eos: Some(259),
    };
    let error = from_json(&byte_bpe(&CONTROL), outside).err().unwrap();
    let is_named = matches!(
        error,
        TokenizerError::SpecialIdOutOfRange {
            role: "EOS",
            id: 259,
            vocab_size: 259
        }
    );
    assert!(is_named, "{error}");
}

#[test]
fn a_tokenizer_without_ends_asks_for_them() {
    let json = byte_bpe(&[("<pad>", 256, true)]);
    let error = from_json(&json, SpecialIds::default()).err().unwrap();
    assert!(
        matches!(error, TokenizerError::NoSpecialToken { role: "BOS", .. }),
        "{error}"
    );
    assert!(
        from_json(
            &json,
            SpecialIds {
                bos: Some(256),
                eos: Some(256)
            }
        )
        .is_ok()
    );
}

/// A word-level vocabulary cannot spell its control tokens any other way.
#[test]
fn text_that_can_only_become_a_control_token_is_refused() {
    let words: Vec<String> = ["<unk>", "one", "<s>", "</s>"].map(String::from).into();
    let json = word_level(&words, &[("<s>", 2, true), ("</s>", 3, true)]);
    let tokenizer = from_json(&json, SpecialIds::default()).unwrap();
    let error = tokenizer.encode("one </s>").unwrap_err();
    assert!(
        matches!(error, TokenizerError::ForbiddenId { id: 3, .. }),
        "{error}"
    );
}

#[test]
fn what_is_no_tokenizer_is_named() {
    let missing = Tokenizer::from_file(Path::new("no/tokenizer.json"), SpecialIds::default());
    assert!(matches!(missing.err().unwrap(), TokenizerError::Io { .. }));
    for json in [
        json!({}),
        json!([1]),
        json!({"version": "1.0", "model": {"type": "BPE"}}),
    ] {
        let error = from_json(&json, SpecialIds::default()).err().unwrap();
        assert!(
            matches!(error, TokenizerError::NotATokenizer { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
}

#[test]
fn ids_beyond_sixteen_bits_survive_packing() {
    let mut words: Vec<String> = (0..128_254).map(|id| format!("w{id}")).collect();
    words.extend(["<s>", "</s>"].map(String::from));
    let json = word_level(&words, &[("<s>", 128_254, true), ("</s>", 128_255, true)]);
    let folder = tempdir().unwrap();
    let tokenizer =
        Tokenizer::from_file(&write_json(folder.path(), &json), SpecialIds::default()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 128_256);
    let shard = write_texts(folder.path(), "shard.parquet", &["w65535 w65536 w128253"]);
    let options = OpenOptions {
        validation_fraction: 0.0,
        ..options(folder.path(), 4)
    };
    let dataset = Dataset::open(&[shard], tokenizer, options).unwrap();
    let row = dataset.stream().unwrap().next().unwrap().unwrap();
    assert_eq!(row.tokens, [128_254, 65_535, 65_536, 128_253]);
    assert_eq!(row.labels, [65_535, 65_536, 128_253, 128_255]);
    assert!(dataset.check_vocabulary(128_256).is_ok());
    let error = dataset.check_vocabulary(65_536).unwrap_err().to_string();
    assert!(
        error.contains("128255") && error.contains("65536"),
        "{error}"
    );
}
