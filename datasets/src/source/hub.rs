//! Data sets on the Hugging Face hub, fetched file by file when they are read.
//!
//! A name is `hf://OWNER/NAME[@REVISION][/PATH]`, where the path is a folder, a file or a pattern.
//! Files go through the hub's usual cache (`HF_HOME`), which other programs share; a fetch that
//! broke off goes on where it stopped.

use std::fmt;
use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use super::is_listed;

/// How names on the hub begin.
pub const SCHEME: &str = "hf://";

/// Attempts at each request that failed.
const RETRIES: usize = 5;

/// Why something on the hub cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name is not one.
    #[error(
        "{name} is no name on the hub; write hf://OWNER/NAME, hf://OWNER/NAME/FOLDER or \
             hf://OWNER/NAME@REVISION/FILE"
    )]
    Name {
        /// What was given.
        name: String,
    },
    /// Nothing there fits.
    #[error(
        "{name} has no .parquet, .jsonl or .bin file; the files there are {}",
        some_of(found)
    )]
    NoMatch {
        /// What was given.
        name: String,
        /// All files of the data set.
        found: Vec<String>,
    },
    /// The hub may not be asked.
    #[error("{name} is not in the hub's cache {}, and HF_HUB_OFFLINE forbids to fetch it; unset \
             that or fetch it elsewhere", cache.display())]
    Offline {
        /// What was wanted.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// The hub did not give it.
    #[error(
        "cannot fetch {name}: {source}; check the name and the network, and set HF_TOKEN if \
             the data set is not open to all"
    )]
    Request {
        /// What was wanted.
        name: String,
        /// What went wrong.
        source: Box<ApiError>,
    },
    /// The bytes are not those that the hub promised.
    #[error("{} is damaged: its SHA-256 is {found}, the hub promises {expected}; remove the file \
             that it links to and fetch it again", path.display())]
    Checksum {
        /// The file in the hub's cache.
        path: PathBuf,
        /// The hub's.
        expected: String,
        /// The file's.
        found: String,
    },
}

fn some_of(names: &[String]) -> String {
    let shown = names
        .iter()
        .take(10)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match names.len() {
        0 => "none".into(),
        1..=10 => shown,
        more => format!("{shown} and {} more", more - 10),
    }
}

/// The hub and its cache on this machine.
#[derive(Clone, Debug)]
pub struct Hub {
    /// The folder of the cache.
    pub cache: PathBuf,
    /// The hub's address, if it is not the usual one.
    pub endpoint: Option<String>,
    /// Who asks.
    pub token: Option<String>,
    /// Take only what the cache has. A folder is then what of it was fetched before.
    pub offline: bool,
    /// Show how a file comes.
    pub progress: bool,
}

impl Hub {
    /// As `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` (or the file that `hf auth login` writes) and
    /// `HF_HUB_OFFLINE` say.
    #[must_use]
    pub fn from_env() -> Self {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let home = variable("HF_HOME").map(PathBuf::from).or_else(|| {
            let home = std::env::home_dir()?;
            Some(home.join(".cache").join("huggingface"))
        });
        let cache = home.unwrap_or_default().join("hub");
        let saved = || Cache::new(cache.clone()).token();
        let is_set = |value: String| {
            ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
        };
        Self {
            endpoint: variable("HF_ENDPOINT"),
            token: variable("HF_TOKEN").or_else(saved),
            offline: variable("HF_HUB_OFFLINE").is_some_and(is_set),
            progress: true,
            cache,
        }
    }

    /// The files that `name` stands for, of the revision's commit as it is now.
    pub(super) fn list(&self, name: &str) -> Result<Vec<HubFile>, HubError> {
        let Name {
            repo,
            revision,
            path,
        } = Name::parse(name)?;
        let (commit, all) = if self.offline {
            self.list_cached(name, &repo, &revision)?
        } else {
            let info = self
                .api(name)?
                .repo(dataset(&repo, &revision))
                .info()
                .map_err(|error| request(name, error))?;
            // For those who come without network. If it cannot be written, neither can the files.
            let _ = Cache::new(self.cache.clone())
                .repo(dataset(&repo, &revision))
                .create_ref(&info.sha);
            let files = info.siblings.into_iter().map(|file| file.rfilename);
            (info.sha, files.collect())
        };
        let files: Vec<HubFile> = all
            .iter()
            .filter(|file| is_meant(&path, file))
            .map(|file| HubFile {
                repo: repo.clone(),
                commit: commit.clone(),
                path: file.clone(),
            })
            .collect();
        if files.is_empty() {
            return Err(HubError::NoMatch {
                name: name.into(),
                found: all,
            });
        }
        Ok(files)
    }

    /// The commit and the files that the cache has of a revision.
    fn list_cached(
        &self,
        name: &str,
        repo: &str,
        revision: &str,
    ) -> Result<(String, Vec<String>), HubError> {
        let folder = self.cache.join(dataset(repo, revision).folder_name());
        // A branch's reference holds its commit; a commit stands for itself.
        let commit = std::fs::read_to_string(folder.join("refs").join(revision))
            .map_or_else(|_| revision.to_owned(), |commit| commit.trim().to_owned());
        let mut files = Vec::new();
        walk(&folder.join("snapshots").join(&commit), "", &mut files);
        if files.is_empty() {
            return Err(self.not_cached(name));
        }
        files.sort();
        Ok((commit, files))
    }

    /// The file in the cache, fetched if it is not there.
    pub(super) fn fetch(&self, file: &HubFile) -> Result<PathBuf, HubError> {
        let repo = dataset(&file.repo, &file.commit);
        let cached = Cache::new(self.cache.clone())
            .repo(repo.clone())
            .pointer_path(&file.commit)
            .join(&file.path);
        if cached.exists() {
            return Ok(cached);
        }
        let name = file.to_string();
        if self.offline {
            return Err(self.not_cached(&name));
        }
        let path = self
            .api(&name)?
            .repo(repo)
            .download(&file.path)
            .map_err(|error| request(&name, error))?;
        Ok(path)
    }

    fn api(&self, name: &str) -> Result<Api, HubError> {
        let mut builder = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_token(self.token.clone())
            .with_retries(RETRIES)
            .with_progress(self.progress);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        builder.build().map_err(|error| request(name, error))
    }

    fn not_cached(&self, name: &str) -> HubError {
        HubError::Offline {
            name: name.into(),
            cache: self.cache.clone(),
        }
    }
}

fn request(name: &str, error: ApiError) -> HubError {
    HubError::Request {
        name: name.into(),
        source: Box::new(error),
    }
}

fn dataset(repo: &str, revision: &str) -> Repo {
    Repo::with_revision(repo.into(), RepoType::Dataset, revision.into())
}

/// A file of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// `OWNER/NAME`.
    pub repo: String,
    /// The commit's hash.
    pub commit: String,
    /// The file's path in it.
    pub path: String,
}

impl HubFile {
    pub(super) fn folder(&self) -> String {
        let folder = self.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{}/{folder}", self.repo)
    }
}

impl fmt::Display for HubFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { repo, commit, path } = self;
        write!(f, "{SCHEME}{repo}@{commit}/{path}")
    }
}

/// Compares a file's SHA-256 with the one that the hub's cache is told by: large files are stored
/// under it. Small ones, stored under another hash, pass.
pub(crate) fn check_sha256(path: &Path, found: &str) -> Result<(), HubError> {
    let blob = std::fs::canonicalize(path).unwrap_or_default();
    let expected = blob.file_name().unwrap_or_default().to_string_lossy();
    let is_sha256 = expected.len() == 64 && expected.bytes().all(|b| b.is_ascii_hexdigit());
    if is_sha256 && *expected != *found {
        return Err(HubError::Checksum {
            path: path.into(),
            expected: expected.into_owned(),
            found: found.into(),
        });
    }
    Ok(())
}

struct Name {
    repo: String,
    revision: String,
    path: String,
}

impl Name {
    fn parse(name: &str) -> Result<Self, HubError> {
        let parse = || {
            let mut parts = name
                .strip_prefix(SCHEME)?
                .trim_end_matches('/')
                .splitn(3, '/');
            let owner = parts.next().filter(|owner| !owner.is_empty())?;
            let repo = parts.next()?;
            let (repo, revision) = repo.split_once('@').unwrap_or((repo, "main"));
            (!repo.is_empty() && !revision.is_empty()).then(|| Self {
                repo: format!("{owner}/{repo}"),
                revision: revision.into(),
                path: parts.next().unwrap_or_default().into(),
            })
        };
        parse().ok_or_else(|| HubError::Name { name: name.into() })
    }
}

/// Whether `file` is `path`, lies somewhere below it, or matches it.
fn is_meant(path: &str, file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let below = path.is_empty()
        || file
            .strip_prefix(path)
            .is_some_and(|rest| rest.starts_with('/'));
    let matches = glob::Pattern::new(path).is_ok_and(|pattern| pattern.matches(file));
    file == path || (is_listed(name) && (below || matches))
}

/// Names the files below a folder; what cannot be read is not there.
fn walk(folder: &Path, prefix: &str, files: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            walk(&entry.path(), &format!("{name}/"), files);
        } else {
            files.push(name);
        }
    }
}
