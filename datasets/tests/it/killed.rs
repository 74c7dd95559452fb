//! A preparation that is killed at any moment goes on to the same cache, byte for byte; so does one
//! that ran out of disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use datasets::{Cache, CacheError};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tempfile::tempdir;

use crate::fixtures::write_texts;

const PROGRAM: &str = env!("CARGO_BIN_EXE_datasets");

/// Three sources of different kinds, 1,200 documents.
fn sources(folder: &Path) -> PathBuf {
    let texts = |source: usize| -> Vec<String> {
        (0..400)
            .map(|n| format!("{source} {n} {}", "word ".repeat(n * 13 % 97)))
            .collect()
    };
    let sources = folder.join("sources");
    fs::create_dir(&sources).unwrap();
    write_texts(&sources, "a.parquet", &texts(0));
    let lines = texts(1)
        .iter()
        .map(|text| format!("{}\n", serde_json::json!({"text": text})))
        .collect::<String>();
    fs::write(
        sources.join("b.jsonl.zst"),
        zstd::encode_all(lines.as_bytes(), 1).unwrap(),
    )
    .unwrap();
    write_texts(&sources, "c.parquet", &texts(2));
    sources
}

fn prepare(sources: &Path, out: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .arg("prepare")
        .arg("--data")
        .arg(sources)
        .arg("--out")
        .arg(out)
        .args(["--shard-tokens", "5000"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let mut files: Vec<_> = entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn killed_at_any_moment_it_goes_on_to_the_same_cache() {
    let folder = tempdir().unwrap();
    let sources = sources(folder.path());
    let whole = folder.path().join("whole");
    let start = Instant::now();
    assert!(prepare(&sources, &whole).status().unwrap().success());
    let usual = start.elapsed();
    let expected = files(&whole);
    assert!(expected.len() > 30, "many shards: {}", expected.len());

    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (mut kills, mut halfway) = (0, 0);
    for round in 0..6 {
        let out = folder.path().join(round.to_string());
        loop {
            let mut child = prepare(&sources, &out).spawn().unwrap();
            let until = usual.mul_f64(rng.random_range(0.0..0.9));
            std::thread::sleep(until);
            if child.try_wait().unwrap().is_some() {
                break;
            }
            // SIGKILL: nothing in the process can tidy up.
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            match Cache::open(&out) {
                // Whole, or no cache at all.
                Ok(_) => assert_eq!(shards(&files(&out)), shards(&expected)),
                Err(CacheError::Unfinished { .. }) => halfway += 1,
                Err(CacheError::NotACache { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert!(prepare(&sources, &out).status().unwrap().success());
        assert_eq!(files(&out), expected, "round {round}");
    }
    assert!(
        kills >= 6 && halfway >= 1,
        "{kills} kills, {halfway} between shards"
    );
}

fn shards(files: &[(String, Vec<u8>)]) -> Vec<&(String, Vec<u8>)> {
    files
        .iter()
        .filter(|(name, _)| name.starts_with("shard-"))
        .collect()
}

/// On a small file system of its own, where this machine lets us have one.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_told_and_leaves_whole_shards() {
    let folder = tempdir().unwrap();
    let sources = sources(folder.path());
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let script = r#"
        mount -t tmpfs -o size=200k none "$1" || exit 77
        "$2" prepare --data "$3" --out "$1/cache" --shard-tokens 5000 && exit 1
        ls -A "$1/cache"
        mount -o remount,size=20m "$1" || exit 77
        "$2" prepare --data "$3" --out "$1/cache" --shard-tokens 5000 >&2 || exit 2
        "$2" check "$1/cache" >&2 || exit 3
    "#;
    let output = Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", script, "sh"])
        .args([&disk, Path::new(PROGRAM), &sources])
        .output();
    let Some(output) = output.ok().filter(|output| {
        let denied = String::from_utf8_lossy(&output.stderr).contains("unshare");
        output.status.code() != Some(77) && !denied
    }) else {
        eprintln!("SKIPPED: this machine gives us no file system of our own");
        return;
    };
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|out| String::from_utf8(out).unwrap());
    assert!(
        output.status.success(),
        "{:?}\n{stdout}\n{stderr}",
        output.status
    );
    assert!(stderr.contains("error: no space left to write"), "{stderr}");
    let left: Vec<&str> = stdout.lines().collect();
    assert!(
        left.contains(&"prepare.json") && left.contains(&"shard-00000.bin"),
        "{stdout}"
    );
    assert!(
        !left.contains(&"manifest.json") && !stdout.contains("unfinished"),
        "{stdout}"
    );
}

/// What a source that changed between two calls leads to.
#[test]
fn sources_that_changed_since_the_kill_are_refused() {
    let folder = tempdir().unwrap();
    let sources = sources(folder.path());
    let out = folder.path().join("out");
    // Until it has a journal, but no manifest.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !out.join("prepare.json").exists() || out.join("manifest.json").exists() {
        assert!(Instant::now() < deadline, "never caught halfway");
        let _ = fs::remove_dir_all(&out);
        let mut child = prepare(&sources, &out).spawn().unwrap();
        while !out.join("prepare.json").exists() && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    write_texts(&sources, "a.parquet", &["another text"]);
    let output = prepare(&sources, &out)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && stderr.contains("holds a token cache of other inputs"),
        "{stderr}"
    );
}
