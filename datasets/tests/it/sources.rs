//! JSON lines, patterns, and several sources at once.

use std::io::Write;
use std::path::{Path, PathBuf};

use datasets::{
    Cache, Dataset, OpenOptions, PrepareError, PrepareOptions, Share, SourceError, Tokenizer,
    prepare,
};
use tempfile::tempdir;

use crate::fixtures::{options, write_texts};

fn lines(texts: &[String]) -> Vec<u8> {
    let line = |text: &String| serde_json::json!({"id": 1, "text": text, "meta": {"a": [1]}});
    let lines = texts.iter().map(|text| format!("{}\n", line(text)));
    lines.collect::<String>().into_bytes()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn texts() -> Vec<String> {
    (0..50)
        .map(|n| format!("text {n} \"ü\"\n{}", "x".repeat(n)))
        .collect()
}

fn make(sources: &[PathBuf], dir: &Path) -> Result<Cache, PrepareError> {
    let options = PrepareOptions::default();
    prepare(
        sources,
        &Tokenizer::byte_level(),
        dir,
        &options,
        &mut |_| {},
    )
}

#[test]
fn compressed_or_not_json_lines_are_the_texts() {
    let folder = tempdir().unwrap();
    let parquet = write_texts(folder.path(), "texts.parquet", &texts());
    let expected = make(&[parquet], &folder.path().join("parquet")).unwrap();
    let plain = lines(&texts());
    let (first, second) = plain.split_at(plain.iter().position(|&b| b == b'\n').unwrap() + 1);
    let spaced = [first, b"\n  \n", second.trim_ascii_end()].concat();
    let cases = [
        ("a.jsonl", plain.clone()),
        ("b.jsonl", spaced),
        ("c.jsonl.gz", gzip(&plain)),
        // Two members, as when files are joined.
        ("d.json.gz", [gzip(first), gzip(second)].concat()),
        ("e.jsonl.zst", zstd::encode_all(&plain[..], 3).unwrap()),
        (
            "f.jsonl.zst",
            [first, second]
                .map(|part| zstd::encode_all(part, 3).unwrap())
                .concat(),
        ),
        // The name lies.
        ("g.jsonl", gzip(&plain)),
    ];
    for (name, bytes) in cases {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let cache = make(&[path], &folder.path().join(format!("{name} cache"))).unwrap();
        assert_eq!(
            cache.manifest().shards,
            expected.manifest().shards,
            "{name}"
        );
        assert_eq!(cache.manifest().counts.rows, 50);
    }
}

#[test]
fn what_is_wrong_with_a_line_is_told_with_its_number() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let plain = lines(&texts());
    let compressed = gzip(&plain);
    let cases: [(&[u8], &str); 6] = [
        (
            b"{\"text\": \"a\"}\n{\"text\": \n",
            "line 2: no JSON object",
        ),
        (b"\n[1]\n", "line 2: no JSON object"),
        (
            b"{\"body\": \"a\", \"id\": 1}\n",
            "line 1: it has no `text`; its keys are body, id",
        ),
        (b"{\"text\": 3}\n", "line 1: `text` is no string"),
        (b"{\"text\": \"\xff\"}\n", "line 1: no JSON object"),
        (&compressed[..compressed.len() / 2], "the file is damaged"),
    ];
    for (bytes, says) in cases {
        std::fs::write(&path, bytes).unwrap();
        let error = make(std::slice::from_ref(&path), &folder.path().join("cache")).unwrap_err();
        let is_it = matches!(error, PrepareError::Source(SourceError::Json { .. }));
        assert!(is_it && error.to_string().contains(says), "{error}");
        assert!(error.to_string().contains("a.jsonl"), "{error}");
    }
    std::fs::write(
        &path,
        b"{\"text\": null}\n{\"text\": \"\"}\n{\"text\": \"ab\"}\n",
    )
    .unwrap();
    let counts = make(&[path], &folder.path().join("cache"))
        .unwrap()
        .manifest()
        .counts;
    assert_eq!((counts.rows, counts.nulls, counts.empties), (3, 1, 1));
}

#[test]
fn folders_patterns_and_files_of_all_kinds_go_together() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir_all(path("in/sub")).unwrap();
    write_texts(&path("in"), "b.parquet", &["b1", "b2"]);
    write_texts(&path("in/sub"), "c.parquet", &["c1"]);
    std::fs::write(path("in/a.jsonl"), "{\"text\": \"a1\"}\n").unwrap();
    std::fs::write(path("in/notes.txt"), "no data").unwrap();
    let text_of = |sources: &[PathBuf], dir: &str| -> String {
        make(sources, &path(dir)).unwrap();
        let options = OpenOptions {
            validation_fraction: 0.0,
            ..options(&path("c"), 2)
        };
        let dataset = Dataset::open(&[path(dir)], None, options).unwrap();
        let rows = dataset.epoch_rows(0, Share::default()).unwrap();
        let labels = rows.flat_map(|row| row.unwrap().labels);
        let mut letters: Vec<u8> = labels.filter_map(|id| u8::try_from(id).ok()).collect();
        letters.sort_unstable();
        String::from_utf8(letters).unwrap()
    };
    assert_eq!(text_of(&[path("in")], "1"), "112abb");
    assert_eq!(text_of(&[path("in/**/*.parquet")], "2"), "112bbc");
    assert_eq!(text_of(&[path("in/a.json*"), path("in/sub")], "3"), "11ac");
    // Named twice, read once.
    assert_eq!(text_of(&[path("in"), path("in/*.parquet")], "4"), "112abb");
    let error = make(&[path("in/*.zip")], &path("5")).unwrap_err();
    assert!(
        matches!(error, PrepareError::Source(SourceError::NoMatch { .. })),
        "{error}"
    );
    let error = make(&[path("in/[")], &path("5")).unwrap_err();
    assert!(
        matches!(error, PrepareError::Source(SourceError::Pattern { .. })),
        "{error}"
    );
}

/// Report DAT-07: eight files in whatever order the file system lists them.
#[test]
fn the_order_of_sources_does_not_matter() {
    let folder = tempdir().unwrap();
    let mut files: Vec<PathBuf> = (0..8)
        .map(|n| {
            write_texts(
                folder.path(),
                &format!("{n}.parquet"),
                &[format!("text {n}")],
            )
        })
        .collect();
    let ordered = make(&files, &folder.path().join("ordered")).unwrap();
    files.reverse();
    files.swap(1, 5);
    let scrambled = make(&files, &folder.path().join("scrambled")).unwrap();
    assert_eq!(ordered.manifest(), scrambled.manifest());
    assert_eq!(ordered.manifest().documents(), 8);
}
