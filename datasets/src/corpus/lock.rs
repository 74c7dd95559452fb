//! The registry packages a lock file pins, and where their sources are.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{CorpusError, select};
use crate::hex;

/// A package by name, version and checksum; ordered by the first two.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(super) struct Package {
    name: String,
    version: String,
    source: Option<String>,
    checksum: Option<String>,
}

impl Package {
    fn is_from_registry(&self) -> bool {
        let source = self.source.as_deref().unwrap_or_default();
        source.starts_with("registry+") || source.starts_with("sparse+")
    }
}

/// A package's name, version and unpacked sources.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) dir: PathBuf,
}

pub(super) struct Lock {
    pub(super) path: PathBuf,
    /// From registries, sorted.
    pub(super) packages: Vec<Package>,
    /// Names the corpus: a hash of the packages and the rule of selection.
    pub(super) identity: String,
}

impl Lock {
    pub(super) fn find(start: &Path) -> Result<Self, CorpusError> {
        let absolute = std::path::absolute(start).unwrap_or_else(|_| start.to_owned());
        let path = absolute
            .ancestors()
            .map(|folder| folder.join("Cargo.lock"))
            .find(|path| path.is_file())
            .ok_or_else(|| CorpusError::NoLock {
                start: start.to_owned(),
            })?;
        let text = std::fs::read_to_string(&path).map_err(|source| CorpusError::Io {
            action: "read",
            path: path.clone(),
            source,
        })?;
        Self::parse(path, &text)
    }

    fn parse(path: PathBuf, text: &str) -> Result<Self, CorpusError> {
        #[derive(Deserialize)]
        struct File {
            #[serde(default)]
            package: Vec<Package>,
        }
        let file: File = toml::from_str(text).map_err(|error| CorpusError::Lock {
            path: path.clone(),
            reason: error.to_string(),
        })?;
        let mut packages = file.package;
        packages.retain(Package::is_from_registry);
        packages.sort();
        let mut hash = Sha256::new();
        hash.update(select::RULE);
        for Package {
            name,
            version,
            checksum,
            ..
        } in &packages
        {
            let checksum = checksum.as_deref().unwrap_or_default();
            hash.update(format!("{name} {version} {checksum}\n"));
        }
        Ok(Self {
            path,
            packages,
            identity: hex(&hash.finalize()),
        })
    }

    /// Where the packages' sources are, in the lock file's order.
    pub(super) fn sources(&self) -> Result<Vec<Source>, CorpusError> {
        let metadata = self.metadata(&["--locked", "--offline"]);
        let metadata = match metadata {
            Ok(metadata) => metadata,
            Err(_) => self
                .metadata(&["--locked"])
                .map_err(|error| CorpusError::Cargo {
                    reason: error.to_string(),
                })?,
        };
        let dirs: HashMap<_, _> = metadata
            .packages
            .iter()
            .filter(|package| package.source.is_some())
            .filter_map(|package| {
                let key = (package.name.to_string(), package.version.to_string());
                Some((
                    key,
                    package.manifest_path.parent()?.as_std_path().to_owned(),
                ))
            })
            .collect();
        let find = |package: &Package| {
            let Package { name, version, .. } = package.clone();
            let dir = dirs
                .get(&(name.clone(), version.clone()))
                .cloned()
                .ok_or_else(|| CorpusError::Cargo {
                    reason: format!("it does not know {name} {version}"),
                })?;
            Ok(Source { name, version, dir })
        };
        self.packages.iter().map(find).collect()
    }

    fn metadata(&self, options: &[&str]) -> cargo_metadata::Result<Metadata> {
        MetadataCommand::new()
            .manifest_path(self.path.with_file_name("Cargo.toml"))
            .other_options(options.iter().map(ToString::to_string).collect::<Vec<_>>())
            .exec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Lock {
        Lock::parse("Cargo.lock".into(), text).unwrap()
    }

    fn package(name: &str, source: &str) -> String {
        format!("[[package]]\nname = \"{name}\"\nversion = \"1.0.0\"\n{source}\n")
    }

    const REGISTRY: &str = "source = \"registry+https://example.org/index\"\nchecksum = \"c0\"";

    #[test]
    fn only_registry_packages_count_in_whatever_order() {
        let (a, b) = (package("a", REGISTRY), package("b", REGISTRY));
        let ours = package("ours", "");
        let git = package("forked", "source = \"git+https://example.org/forked#0\"");
        let lock = parse(&[a.clone(), ours, git, b.clone()].concat());
        let names: Vec<_> = lock
            .packages
            .iter()
            .map(|package| package.name.as_str())
            .collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(
            lock.identity,
            parse(&[b.clone(), a.clone()].concat()).identity
        );
        assert_ne!(lock.identity, parse(&a).identity);
        let other = b.replace("c0", "c1");
        assert_ne!(
            lock.identity,
            parse(&[a, other].concat()).identity,
            "the checksum counts"
        );
    }

    #[test]
    fn a_file_that_is_no_lock_is_named() {
        let error = Lock::parse("some/Cargo.lock".into(), "package = 3")
            .err()
            .unwrap();
        assert!(error.to_string().contains("some/Cargo.lock"), "{error}");
    }
}
