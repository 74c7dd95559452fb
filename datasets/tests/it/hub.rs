//! The hub, played by a server in this process, and its cache on disk. No network is touched.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use datasets::source::HubError;
use datasets::{Cache, Hub, PrepareError, PrepareOptions, SourceError, Tokenizer, prepare};
use sha2::{Digest, Sha256};
use tempfile::tempdir;

use crate::fixtures::write_texts;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// What the server has and was asked.
#[derive(Default)]
struct Served {
    /// By path in the data set: what the file is said to be, and what is sent.
    files: HashMap<String, (Vec<u8>, Vec<u8>)>,
    /// Bytes after which the next answer breaks off.
    cut_after: Option<usize>,
    asked: Vec<String>,
}

struct Server {
    address: String,
    served: Arc<Mutex<Served>>,
}

impl Server {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let same =
            |(path, bytes): &(&str, &[u8])| ((*path).to_owned(), (bytes.to_vec(), bytes.to_vec()));
        let served = Arc::new(Mutex::new(Served {
            files: files.iter().map(same).collect(),
            ..Served::default()
        }));
        let shared = Arc::clone(&served);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                answer(&mut stream.unwrap(), &mut shared.lock().unwrap());
            }
        });
        Self { address, served }
    }

    fn hub(&self, cache: &Path) -> Hub {
        Hub {
            cache: cache.to_owned(),
            endpoint: Some(self.address.clone()),
            token: Some("secret".into()),
            offline: false,
            progress: false,
        }
    }
}

fn answer(stream: &mut TcpStream, served: &mut Served) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let request = lines.next().unwrap().unwrap();
    let headers: Vec<String> = lines
        .map(|line| line.unwrap().to_ascii_lowercase())
        .take_while(|line| !line.is_empty())
        .collect();
    let has_token = headers
        .iter()
        .any(|line| line == "authorization: bearer secret");
    let path = request.split(' ').nth(1).unwrap().to_owned();
    served.asked.push(path.clone());
    let resolve = format!("/datasets/o/n/resolve/{COMMIT}/");
    let missing = || b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec();
    let mut response = if !has_token {
        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n".to_vec()
    } else if path == "/api/datasets/o/n/revision/main" {
        let mut names: Vec<&String> = served.files.keys().collect();
        names.sort();
        let siblings = names
            .iter()
            .map(|name| serde_json::json!({"rfilename": name}));
        let siblings: Vec<_> = siblings.collect();
        let body = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
        let length = body.len();
        format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
            .into_bytes()
    } else if let Some((said, sent)) = path
        .strip_prefix(&resolve)
        .and_then(|path| served.files.get(path))
    {
        let range = headers
            .iter()
            .find_map(|line| line.strip_prefix("range: bytes="))
            .unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let start: usize = start.parse().unwrap();
        let end = end.parse().map_or(sent.len(), |end: usize| end + 1);
        let (etag, total) = (sha256(said), sent.len());
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes \
             {start}-{}/{total}\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nConnection: \
             close\r\n\r\n",
            end - start,
            end - 1,
        );
        [head.as_bytes(), &sent[start..end]].concat()
    } else {
        missing()
    };
    if response.len() > 2000
        && let Some(cut) = served.cut_after.take()
    {
        response.truncate(cut);
    }
    // The client may hang up first.
    let _ = stream.write_all(&response);
}

fn make(name: &str, dir: &Path, hub: Hub) -> Result<Cache, PrepareError> {
    let options = PrepareOptions {
        hub,
        ..PrepareOptions::default()
    };
    prepare(
        &[PathBuf::from(name)],
        &Tokenizer::byte_level(),
        dir,
        &options,
        &mut |_| {},
    )
}

fn hub_error(result: Result<Cache, PrepareError>) -> HubError {
    match result.unwrap_err() {
        PrepareError::Source(SourceError::Hub(error)) => error,
        error => panic!("{error}"),
    }
}

/// Two Parquet files of 40 and 50 texts.
fn parquets(folder: &Path) -> [Vec<u8>; 2] {
    [40, 50].map(|count| {
        let texts: Vec<String> = (0..count)
            .map(|n| format!("text {n} of {count} {}", n * n))
            .collect();
        fs::read(write_texts(folder, "source.parquet", &texts)).unwrap()
    })
}

#[test]
fn files_come_from_the_hub_once_and_then_from_its_cache() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let [a, b] = parquets(folder.path());
    let server = Server::new(&[
        ("sample/10BT/000.parquet", &a),
        ("sample/10BT/001.parquet", &b),
        ("sample/10BT/.hidden.parquet", b"no"),
        ("sample/100BT/000.parquet", b"no"),
        ("README.md", b"no"),
    ]);
    let hub = server.hub(&path("hub"));
    // The first file breaks off once, and its rest is asked for.
    server.served.lock().unwrap().cut_after = Some(1500);
    let cache = make("hf://o/n/sample/10BT", &path("1"), hub.clone()).unwrap();
    assert_eq!(cache.manifest().documents(), 90);
    let names: Vec<_> = cache
        .manifest()
        .sources
        .iter()
        .map(|source| &source.name)
        .collect();
    let name = |file| format!("hf://o/n@{COMMIT}/sample/10BT/{file}.parquet");
    assert_eq!(names, [&name("000"), &name("001")]);
    assert_eq!(cache.manifest().sources[0].sha256, sha256(&a));

    let asked = server.served.lock().unwrap().asked.len();
    make("hf://o/n/sample/10BT/00*.parquet", &path("2"), hub.clone()).unwrap();
    assert_eq!(
        server.served.lock().unwrap().asked.len(),
        asked + 1,
        "the list alone"
    );
    let offline = Hub {
        offline: true,
        ..hub
    };
    let again = make("hf://o/n/sample/10BT", &path("3"), offline).unwrap();
    assert_eq!(server.served.lock().unwrap().asked.len(), asked + 1);
    assert_eq!(again.manifest().shards, cache.manifest().shards);
}

#[test]
fn bytes_that_the_hub_did_not_promise_are_refused() {
    let folder = tempdir().unwrap();
    let [a, _] = parquets(folder.path());
    let server = Server::new(&[("a.parquet", &a)]);
    let mut damaged = a.clone();
    damaged[10] ^= 1;
    server
        .served
        .lock()
        .unwrap()
        .files
        .get_mut("a.parquet")
        .unwrap()
        .1 = damaged;
    let hub = server.hub(&folder.path().join("hub"));
    let error = hub_error(make("hf://o/n", &folder.path().join("1"), hub));
    let is_it = matches!(&error, HubError::Checksum { expected, .. } if *expected == sha256(&a));
    assert!(is_it, "{error}");
}

/// As other programs write the cache: a branch's reference, and links to blobs.
#[test]
fn without_network_the_cache_of_other_programs_serves() {
    let folder = tempdir().unwrap();
    let [a, _] = parquets(folder.path());
    let repo = folder.path().join("hub/datasets--o--n");
    let snapshot = repo.join("snapshots").join(COMMIT).join("data");
    for dir in [&repo.join("refs"), &repo.join("blobs"), &snapshot] {
        fs::create_dir_all(dir).unwrap();
    }
    fs::write(repo.join("refs/main"), COMMIT).unwrap();
    let blob = repo.join("blobs").join(sha256(&a));
    fs::write(&blob, &a).unwrap();
    std::os::unix::fs::symlink(&blob, snapshot.join("a.parquet")).unwrap();
    let hub = Hub {
        cache: folder.path().join("hub"),
        endpoint: None,
        token: None,
        offline: true,
        progress: false,
    };
    let path = |name: &str| folder.path().join(name);
    for (number, name) in ["hf://o/n", "hf://o/n/data", "hf://o/n/data/a.parquet"]
        .iter()
        .enumerate()
    {
        let cache = make(name, &path(&number.to_string()), hub.clone()).unwrap();
        assert_eq!(cache.manifest().documents(), 40);
    }
    let by_commit = format!("hf://o/n@{COMMIT}/data");
    assert!(make(&by_commit, &path("by commit"), hub.clone()).is_ok());
    for name in ["hf://o/other", "hf://o/n@branch"] {
        let error = hub_error(make(name, &path("none"), hub.clone()));
        assert!(matches!(error, HubError::Offline { .. }), "{error}");
    }
    let error = hub_error(make("hf://o/n/elsewhere", &path("none"), hub));
    assert!(
        error
            .to_string()
            .contains("the files there are data/a.parquet"),
        "{error}"
    );
}

#[test]
fn names_and_answers_that_are_none_are_told() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let server = Server::new(&[("a.parquet", b"no")]);
    let hub = server.hub(&path("hub"));
    for name in ["hf://", "hf://o", "hf://o/", "hf:///n", "hf://o/n@"] {
        let error = hub_error(make(name, &path("1"), hub.clone()));
        assert!(matches!(error, HubError::Name { .. }), "{name}: {error}");
    }
    let error = hub_error(make("hf://o/other", &path("1"), hub.clone()));
    assert!(matches!(error, HubError::Request { .. }), "{error}");
    assert!(
        error.to_string().contains("hf://o/other") && error.to_string().contains("404"),
        "{error}"
    );
    let stranger = Hub { token: None, ..hub };
    let error = hub_error(make("hf://o/n", &path("1"), stranger));
    assert!(
        error.to_string().contains("401") && error.to_string().contains("HF_TOKEN"),
        "{error}"
    );
}
