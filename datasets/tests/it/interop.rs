//! `.bin` files, both ways, against a reader and a writer that follow llm.c's layout by themselves.

use std::path::{Path, PathBuf};

use datasets::{Cache, PrepareError, PrepareOptions, SourceError, SpecialIds, Tokenizer, prepare};
use tempfile::tempdir;

use crate::fixtures::{byte_bpe, word_level, write_json, write_texts};

/// llm.c's layout: 256 words of header, then ids.
pub fn write_bin(path: &Path, magic: i32, version: i32, ids: &[u32]) {
    let mut bytes = vec![0; 1024];
    for (word, value) in [magic, version, ids.len() as i32].into_iter().enumerate() {
        bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
    }
    for &id in ids {
        if magic == 20_240_520 {
            bytes.extend(u16::try_from(id).unwrap().to_le_bytes());
        } else {
            bytes.extend(id.to_le_bytes());
        }
    }
    std::fs::write(path, bytes).unwrap();
}

/// As llm.c's loader reads: magic, version, number and size must fit.
pub fn read_bin(path: &Path) -> Vec<u32> {
    let bytes = std::fs::read(path).unwrap();
    let word = |at: usize| i32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().unwrap());
    assert!((3..256).all(|at| word(at) == 0));
    let ids = &bytes[1024..];
    let count = word(2) as usize;
    match (word(0), word(1)) {
        (20_240_520, 1) => {
            assert_eq!(ids.len(), 2 * count);
            let ids = ids
                .chunks(2)
                .map(|id| u16::from_le_bytes(id.try_into().unwrap()));
            ids.map(u32::from).collect()
        }
        (20_240_801, 7) => {
            assert_eq!(ids.len(), 4 * count);
            let ids = ids
                .chunks(4)
                .map(|id| u32::from_le_bytes(id.try_into().unwrap()));
            ids.collect()
        }
        header => panic!("{header:?}"),
    }
}

/// GPT-2's and Llama 3's arrangement: one token for both ends, or two.
fn tokenizers(folder: &Path) -> [Tokenizer; 2] {
    let narrow = byte_bpe(&[("<|endoftext|>", 256, true)]);
    let mut words: Vec<String> = (0..70_000).map(|id| format!("w{id}")).collect();
    words.extend(["<s>", "</s>"].map(String::from));
    let wide = word_level(&words, &[("<s>", 70_000, true), ("</s>", 70_001, true)]);
    [narrow, wide].map(|json| {
        Tokenizer::from_file(&write_json(folder, &json), SpecialIds::default()).unwrap()
    })
}

fn bins(dir: &Path) -> Vec<u32> {
    let cache = Cache::open(dir).unwrap();
    let shards = cache.manifest().shards.iter();
    shards
        .flat_map(|shard| read_bin(&dir.join(format!("{}.bin", shard.name))))
        .collect()
}

fn make(sources: &[PathBuf], tokenizer: &Tokenizer, dir: &Path) -> Result<Cache, PrepareError> {
    let options = PrepareOptions {
        shard_tokens: 100,
        ..PrepareOptions::default()
    };
    prepare(sources, tokenizer, dir, &options, &mut |_| {})
}

#[test]
fn shards_are_llm_c_files_of_both_widths() {
    let folder = tempdir().unwrap();
    let texts: Vec<String> = (0..40)
        .map(|n| format!("w{} w{} w65536", n, 3 * n))
        .collect();
    let source = write_texts(folder.path(), "texts.parquet", &texts);
    for (number, tokenizer) in tokenizers(folder.path()).into_iter().enumerate() {
        let dir = folder.path().join(number.to_string());
        let cache = make(std::slice::from_ref(&source), &tokenizer, &dir).unwrap();
        assert!(cache.manifest().shards.len() > 1);
        assert!(
            cache
                .manifest()
                .shards
                .iter()
                .all(|shard| shard.tokens <= 100)
        );
        let expected: Vec<u32> = texts
            .iter()
            .flat_map(|text| [vec![tokenizer.bos()], tokenizer.encode(text).unwrap()].concat())
            .collect();
        assert_eq!(bins(&dir), expected);
    }
}

#[test]
fn llm_c_files_become_the_same_cache_as_their_texts() {
    let folder = tempdir().unwrap();
    let texts: Vec<String> = (0..40).map(|n| format!("w{n} w65536 w{}", 2 * n)).collect();
    let source = write_texts(folder.path(), "texts.parquet", &texts);
    for (number, tokenizer) in tokenizers(folder.path()).into_iter().enumerate() {
        let path = |name: &str| folder.path().join(format!("{number}-{name}"));
        make(std::slice::from_ref(&source), &tokenizer, &path("of texts")).unwrap();
        let ids = bins(&path("of texts"));
        let (magic, version) = [(20_240_520, 1), (20_240_801, 7)][number];
        std::fs::create_dir(path("bins")).unwrap();
        // Documents go on in the next file, one of them over three.
        for (shard, ids) in [&ids[..70], &ids[70..71], &ids[71..72], &ids[72..]]
            .iter()
            .enumerate()
        {
            write_bin(
                &path("bins").join(format!("{shard}.bin")),
                magic,
                version,
                ids,
            );
        }
        make(&[path("bins")], &tokenizer, &path("of bins")).unwrap();
        assert_eq!(bins(&path("of bins")), ids);
        let cache = Cache::open(&path("of bins")).unwrap();
        assert_eq!(cache.manifest().documents(), texts.len() as u64);
        if number == 0 {
            // Byte tokens decode to the very texts, so the indices agree as well.
            let of_texts = Cache::open(&path("of texts")).unwrap();
            assert_eq!(cache.manifest().shards, of_texts.manifest().shards);
        }
    }
}

#[test]
fn a_bin_file_of_another_tokenizer_or_without_its_head_is_refused() {
    let folder = tempdir().unwrap();
    let [narrow, wide] = tokenizers(folder.path());
    let path = folder.path().join("a.bin");
    let refused = |ids: &[u32], magic, tokenizer: &Tokenizer| {
        write_bin(&path, magic, 1, ids);
        let error = make(
            std::slice::from_ref(&path),
            tokenizer,
            &folder.path().join("out"),
        );
        let error = error.unwrap_err();
        let is_it = matches!(
            error,
            PrepareError::Source(SourceError::BinTokenizer { .. })
        );
        assert!(is_it, "{error}");
        error.to_string()
    };
    let message = refused(&[256, 1, 2], 20_240_520, &wide);
    assert!(
        message.contains("ids have 2 bytes, those of 70002 ids have 4"),
        "{message}"
    );
    let message = refused(&[1, 2, 3], 20_240_520, &narrow);
    assert!(message.contains("its BOS 256 stands nowhere"), "{message}");
    let message = refused(&[1, 2, 256, 3], 20_240_520, &narrow);
    assert!(
        message.contains("2 ids stand before the first document"),
        "{message}"
    );
    let message = refused(&[256, 1, 300], 20_240_520, &narrow);
    assert!(
        message.contains("id 300, outside its vocabulary"),
        "{message}"
    );
}

#[test]
fn a_bin_file_that_is_none_or_has_another_size_is_refused() {
    let folder = tempdir().unwrap();
    let [narrow, _] = tokenizers(folder.path());
    let path = folder.path().join("a.bin");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let out = folder.path().join("out");
        let error = make(std::slice::from_ref(&path), &narrow, &out).unwrap_err();
        assert!(error.to_string().contains("a.bin"), "{error}");
        error.to_string()
    };
    write_bin(&path, 20_240_520, 1, &[256, 1, 2]);
    let good = std::fs::read(&path).unwrap();
    assert!(refused(&good[..good.len() - 1]).contains("truncated"));
    assert!(refused(&[&good[..], &[0]].concat()).contains("overlong"));
    assert!(refused(&good[..1000]).contains("1000 bytes do not hold its 1024-byte header"));
    let mut other = good.clone();
    other[0] ^= 1;
    assert!(refused(&other).contains("its first word is 20240521"));
    other = good;
    other[4] = 2;
    assert!(refused(&other).contains("its version is 2"));
}
