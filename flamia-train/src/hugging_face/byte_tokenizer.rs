//! The byte-level tokenizer as a `tokenizer.json`.

use serde_json::{Map, Value, json};

/// How control tokens are spelled, from id 256 on: a document's start, its end, padding.
pub(super) const CONTROL: [&str; 3] = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"];

/// A `tokenizer.json` that turns a text into the ids that training had for it, BOS in front.
///
/// It is a BPE without merges. The library's byte-level step spells each byte as a letter of its own,
/// and the vocabulary gives that letter the byte's value as its id.
pub fn byte_tokenizer() -> Value {
    let vocabulary: Map<String, Value> = (0..=255u8)
        .map(|byte| (letter(byte).to_string(), json!(byte)))
        .collect();
    let control: Vec<Value> = (256..)
        .zip(CONTROL)
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let bos = json!({"SpecialToken": {"id": CONTROL[0], "type_id": 0}});
    let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": control,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text("A")],
            "pair": [bos, text("A"), bos, text("B")],
            "special_tokens": {
                CONTROL[0]: {"id": CONTROL[0], "ids": [256], "tokens": [CONTROL[0]]},
            },
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocabulary, "merges": [],
        },
    })
}

/// GPT-2's spelling of bytes: those that print stand for themselves, the others for letters from
/// U+0100 on, in order.
fn letter(byte: u8) -> char {
    let prints = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match prints(&byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|byte| !prints(byte)).count() as u32;
            char::from_u32(0x100 + before).expect("68 letters from U+0100 on")
        }
    }
}

#[cfg(test)]
mod tests {
    use datasets::{SpecialIds, Tokenizer};

    use super::*;

    #[test]
    fn the_library_makes_the_ids_of_the_byte_level_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, byte_tokenizer().to_string()).unwrap();
        let theirs = Tokenizer::from_file(&path, SpecialIds::default()).unwrap();
        let ours = Tokenizer::byte_level();
        assert_eq!(theirs.vocab_size(), ours.vocab_size());
        assert_eq!((theirs.bos(), theirs.eos()), (ours.bos(), ours.eos()));
        // All characters of one and two bytes, and with them every byte but those of longer ones.
        let short: String = (0..0x800).filter_map(char::from_u32).collect();
        for text in [
            &short,
            " two  blanks\n\tand a line",
            "€ 𝄞 日本語 \u{10ffff}",
            "",
        ] {
            let ids = ours.encode(text).unwrap();
            assert_eq!(theirs.encode(text).unwrap(), ids);
            assert_eq!(theirs.decode(&ids).unwrap(), text);
        }
    }
}
