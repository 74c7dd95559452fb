//! Damage to a cache, and everything else that can be wrong with it: an error that names the file,
//! and nothing else touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use datasets::{
    Cache, CacheError, Dataset, DatasetError, OpenOptions, PrepareError, PrepareOptions,
    SpecialIds, Tokenizer, prepare,
};
use tempfile::{TempDir, tempdir};

use crate::fixtures::{byte_bpe, write_json, write_texts};

fn small() -> PrepareOptions {
    PrepareOptions {
        shard_tokens: 500,
        ..PrepareOptions::default()
    }
}

fn make(source: &Path, dir: &Path, options: &PrepareOptions) -> Result<Cache, PrepareError> {
    let sources = [source.to_owned()];
    prepare(
        &sources,
        &Tokenizer::byte_level(),
        dir,
        options,
        &mut |_| {},
    )
}

/// A source and a cache of it with several shards.
fn sample() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempdir().unwrap();
    let texts: Vec<String> = (0..60).map(|n| format!("{n} {}", "ab".repeat(n))).collect();
    let source = write_texts(folder.path(), "texts.parquet", &texts);
    let dir = folder.path().join("cache");
    let cache = make(&source, &dir, &small()).unwrap();
    assert!(cache.manifest().shards.len() >= 4);
    (folder, source, dir)
}

fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = paths
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

/// The shards that `check` finds damaged.
fn damaged(dir: &Path) -> Vec<(String, String)> {
    let checks = Cache::check(dir).unwrap().into_iter();
    checks
        .filter_map(|check| Some((check.name, check.result.err()?.to_string())))
        .collect()
}

#[test]
fn a_flipped_byte_anywhere_in_a_shard_is_found_by_check() {
    let (_folder, _, dir) = sample();
    assert_eq!(damaged(&dir), []);
    for name in ["shard-00001.bin", "shard-00002.idx"] {
        let path = dir.join(name);
        let whole = fs::read(&path).unwrap();
        for place in (0..whole.len()).step_by(37).chain([whole.len() - 1]) {
            let mut bytes = whole.clone();
            bytes[place] ^= 0x10;
            fs::write(&path, &bytes).unwrap();
            let found = damaged(&dir);
            assert_eq!(found.len(), 1, "byte {place}: {found:?}");
            assert!(name.starts_with(&found[0].0), "{found:?}");
        }
        fs::write(&path, &whole).unwrap();
    }
    assert_eq!(damaged(&dir), []);
}

#[test]
fn a_truncated_shard_is_refused_at_once() {
    let (_folder, _, dir) = sample();
    for (name, cuts) in [("shard-00001.bin", [1, 600]), ("shard-00001.idx", [1, 40])] {
        let path = dir.join(name);
        let whole = fs::read(&path).unwrap();
        for cut in cuts {
            fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            let error = Cache::open(&dir).unwrap_err();
            let source = std::error::Error::source(&error).map(ToString::to_string);
            let message = format!("{error}: {source:?}");
            assert!(message.contains(name), "{message}");
            assert_eq!(damaged(&dir).len(), 1);
        }
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn a_missing_file_is_named() {
    let (_folder, _, dir) = sample();
    for name in ["shard-00002.bin", "shard-00000.idx"] {
        let aside = dir.with_extension("aside");
        fs::rename(dir.join(name), &aside).unwrap();
        let error = Cache::open(&dir).unwrap_err();
        assert!(
            matches!(&error, CacheError::Missing { path } if path.ends_with(name)),
            "{error}"
        );
        assert_eq!(damaged(&dir).len(), 1, "the others are whole");
        fs::rename(aside, dir.join(name)).unwrap();
    }
}

#[test]
fn a_changed_manifest_is_not_trusted() {
    let (_folder, _, dir) = sample();
    let path = dir.join("manifest.json");
    let whole = fs::read_to_string(&path).unwrap();
    let changes = [
        whole.replacen("\"documents\": ", "\"documents\": 1", 1),
        whole.replacen("uint16", "uint32", 1),
        whole[..whole.len() / 2].to_owned(),
        String::new(),
    ];
    for changed in changes {
        assert_ne!(changed, whole);
        fs::write(&path, changed).unwrap();
        let error = Cache::open(&dir).unwrap_err();
        assert!(matches!(error, CacheError::Manifest { .. }), "{error}");
    }
    fs::write(&path, whole.replacen("\"version\": 1", "\"version\": 9", 1)).unwrap();
    let error = Cache::open(&dir).unwrap_err();
    assert!(
        matches!(error, CacheError::Version { found: 9, .. }),
        "{error}"
    );
}

#[test]
fn another_tokenizer_is_refused() {
    let (folder, _, dir) = sample();
    let json = write_json(folder.path(), &byte_bpe(&[("<|endoftext|>", 256, true)]));
    let other = Tokenizer::from_file(&json, SpecialIds::default()).unwrap();
    let options = || OpenOptions::new(64);
    let error = Dataset::open(std::slice::from_ref(&dir), other, options())
        .err()
        .unwrap();
    let is_it = matches!(error, DatasetError::Cache(CacheError::Tokenizer { .. }));
    assert!(is_it, "{error}");
    assert!(error.to_string().contains("byte-level"), "{error}");
    // Its own, named or not, is taken.
    assert!(
        Dataset::open(
            std::slice::from_ref(&dir),
            Tokenizer::byte_level(),
            options()
        )
        .is_ok()
    );
    assert!(Dataset::open(&[dir], None, options()).is_ok());
}

#[test]
fn a_copy_of_the_tokenizer_that_was_changed_is_refused() {
    let folder = tempdir().unwrap();
    let source = write_texts(folder.path(), "texts.parquet", &["abc def ghi"; 9]);
    let json = write_json(folder.path(), &byte_bpe(&[("<|endoftext|>", 256, true)]));
    let tokenizer = Tokenizer::from_file(&json, SpecialIds::default()).unwrap();
    let dir = folder.path().join("cache");
    prepare(&[source], &tokenizer, &dir, &small(), &mut |_| {}).unwrap();
    let options = || OpenOptions {
        validation_fraction: 0.0,
        ..OpenOptions::new(16)
    };
    assert!(Dataset::open(std::slice::from_ref(&dir), None, options()).is_ok());
    let mut copy = fs::read(dir.join("tokenizer.json")).unwrap();
    copy.push(b'\n');
    fs::write(dir.join("tokenizer.json"), copy).unwrap();
    let error = Dataset::open(&[dir], None, options()).err().unwrap();
    let is_it = matches!(error, DatasetError::Cache(CacheError::Tokenizer { .. }));
    assert!(is_it, "{error}");
}

#[test]
fn an_id_that_went_wrong_never_reaches_the_model() {
    let (_folder, _, dir) = sample();
    let path = dir.join("shard-00000.bin");
    let mut bytes = fs::read(&path).unwrap();
    // The second token, a letter, becomes 0xff00 and more.
    bytes[1024 + 3] = 0xff;
    fs::write(&path, bytes).unwrap();
    let dataset = Dataset::open(&[dir], None, OpenOptions::new(64)).unwrap();
    let rows = dataset.report().train.rows + dataset.report().validation.rows;
    let mut all = dataset
        .epoch_rows(0, datasets::Share::default())
        .unwrap()
        .chain(dataset.validation_rows());
    let error = all
        .find_map(Result::err)
        .expect("one of the rows is refused");
    assert!(
        rows > 0 && error.to_string().contains("it holds id 65"),
        "{error}"
    );
}

#[test]
fn a_second_process_is_told_or_waits() {
    let (folder, source, _) = sample();
    let dir = folder.path().join("busy");
    fs::create_dir(&dir).unwrap();
    // What the process holds that prepares.
    let lock = fs::File::create(dir.join("prepare.lock")).unwrap();
    lock.lock().unwrap();
    let error = make(&source, &dir, &small()).unwrap_err();
    let is_it = matches!(error, PrepareError::Cache(CacheError::Busy { .. }));
    assert!(is_it, "{error}");
    assert_eq!(files(&dir).len(), 1, "nothing was written");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let options = PrepareOptions {
                wait: true,
                ..small()
            };
            make(&source, &dir, &options).unwrap()
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waiting.is_finished());
        lock.unlock().unwrap();
        assert_eq!(waiting.join().unwrap().manifest().documents(), 60);
    });
}

#[test]
fn two_that_prepare_at_once_make_one_cache() {
    let (folder, source, expected) = sample();
    let dir = folder.path().join("both");
    let options = PrepareOptions {
        wait: true,
        ..small()
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| make(&source, &dir, &options).unwrap());
        }
    });
    let contents = |dir| {
        files(dir)
            .into_iter()
            .map(|(_, bytes)| bytes)
            .collect::<Vec<_>>()
    };
    assert_eq!(contents(&dir), contents(&expected));
}

#[test]
fn a_cache_is_found_again_and_other_inputs_are_refused() {
    let (folder, source, dir) = sample();
    let before = files(&dir);
    let mut calls = 0;
    let sources = [source.clone()];
    let tokenizer = Tokenizer::byte_level();
    prepare(&sources, &tokenizer, &dir, &small(), &mut |_| calls += 1).unwrap();
    assert_eq!((calls, files(&dir)), (0, before.clone()));

    let refused = |source: &Path, options: &PrepareOptions| {
        let error = make(source, &dir, options).unwrap_err();
        let is_it = matches!(error, PrepareError::Cache(CacheError::OtherInputs { .. }));
        assert!(is_it, "{error}");
        assert_eq!(files(&dir), before);
    };
    refused(
        &source,
        &PrepareOptions {
            shard_tokens: 400,
            ..small()
        },
    );
    let other = write_texts(folder.path(), "other.parquet", &["x"; 50]);
    refused(&other, &small());
    let rebuild = PrepareOptions {
        rebuild: true,
        ..small()
    };
    assert_eq!(
        make(&other, &dir, &rebuild).unwrap().manifest().documents(),
        50
    );
    assert_eq!(files(&dir).len(), 4, "no shard of the old cache is left");
}

#[test]
fn progress_rises_to_all_of_the_sources() {
    let (folder, source, _) = sample();
    let dir = folder.path().join("again");
    let (tokenizer, mut seen) = (Tokenizer::byte_level(), Vec::new());
    let mut keep = |progress| seen.push(progress);
    let cache = prepare(&[source], &tokenizer, &dir, &small(), &mut keep).unwrap();
    let last = seen.last().unwrap();
    let manifest = cache.manifest();
    assert_eq!(last.share, 1.0);
    assert_eq!(
        (last.documents, last.tokens, last.text_bytes),
        (
            manifest.documents(),
            manifest.tokens(),
            manifest.text_bytes()
        )
    );
    assert!(seen.is_sorted_by(|a, b| a.share <= b.share && a.tokens <= b.tokens));
}

#[test]
fn sources_without_documents_make_no_cache() {
    let folder = tempdir().unwrap();
    let source = write_texts(folder.path(), "texts.parquet", &["", ""]);
    let dir = folder.path().join("cache");
    let error = make(&source, &dir, &small()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("2 records: 0 without text, 2 empty"),
        "{error}"
    );
    assert!(matches!(
        Cache::open(&dir),
        Err(CacheError::NotACache { .. })
    ));
}

#[test]
fn equal_inputs_make_equal_caches_whatever_the_threads() {
    let (folder, source, dir) = sample();
    for threads in [1, 3] {
        let again = folder.path().join(threads.to_string());
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| make(&source, &again, &small())).unwrap();
        let contents = |dir| {
            files(dir)
                .into_iter()
                .map(|(_, bytes)| bytes)
                .collect::<Vec<_>>()
        };
        assert_eq!(contents(&again), contents(&dir));
    }
}
