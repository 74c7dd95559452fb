//! Which files make the corpus: a balanced few megabytes, decided by names and texts alone.
//!
//! Files are taken in the order of a hash of their name, so the choice is an even mix over all
//! packages, until each kind has its budget. Caps per file and per package keep generated tables
//! and bindings of thousands of files from filling it.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::lock::Source;
use super::{CorpusError, Skipped, Summary};
use crate::hex;

/// Part of the corpus' identity: change it with the rule or the columns.
pub(super) const RULE: &str = "flamia corpus 1\n";

/// The longest file taken.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Each package's share of each kind.
const MAX_PACKAGE_BYTES: u64 = 128 << 10;

/// The prose among the sources is scarce, so it has a budget of its own.
const BUDGETS: [(Kind, u64); 2] = [(Kind::Markdown, 2_000_000), (Kind::Rust, 6_000_000)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Markdown,
    Rust,
}

impl Kind {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "md" => Some(Self::Markdown),
            "rs" => Some(Self::Rust),
            _ => None,
        }
    }

    pub(super) fn language(self) -> &'static str {
        match self {
            Self::Markdown => "markdown",
            Self::Rust => "rust",
        }
    }
}

/// A file taken.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) text: String,
    /// SHA-256 of the text, in hexadecimal.
    pub(super) text_hash: String,
    /// `name-version/path/in/package`.
    pub(super) file_path: String,
    /// The package URL of the file.
    pub(super) url: String,
    pub(super) kind: Kind,
}

/// A file that may be taken.
struct Candidate<'a> {
    package: &'a Source,
    relative: String,
    kind: Kind,
    bytes: u64,
    rank: [u8; 32],
}

impl Candidate<'_> {
    fn file_path(&self) -> String {
        let Source { name, version, .. } = self.package;
        format!("{name}-{version}/{}", self.relative)
    }
}

/// Chooses and reads the files; the result is sorted by package and path.
pub(super) fn select(packages: &[Source]) -> Result<(Vec<Document>, Summary), CorpusError> {
    let mut summary = Summary {
        packages: packages.len() as u64,
        ..Summary::default()
    };
    let mut candidates = Vec::new();
    for package in packages {
        walk(
            package,
            &package.dir,
            "",
            &mut candidates,
            &mut summary.skipped,
        )?;
    }
    // By rank, and by name should two hashes ever agree.
    candidates.sort_by_cached_key(|candidate| (candidate.rank, candidate.file_path()));
    let mut texts = HashSet::new();
    let mut documents = Vec::new();
    for (kind, budget) in BUDGETS {
        let of_kind = candidates.iter().filter(|candidate| candidate.kind == kind);
        let taken = take(
            of_kind,
            budget,
            &mut texts,
            &mut documents,
            &mut summary.skipped,
        )?;
        match kind {
            Kind::Markdown => summary.markdown_bytes = taken,
            Kind::Rust => summary.rust_bytes = taken,
        }
    }
    documents.sort_by(|a, b| a.file_path.cmp(&b.file_path));
    summary.documents = documents.len() as u64;
    summary.bytes = summary.markdown_bytes + summary.rust_bytes;
    Ok((documents, summary))
}

/// Takes files while they fit the budget; returns the bytes taken.
fn take<'a>(
    candidates: impl Iterator<Item = &'a Candidate<'a>>,
    budget: u64,
    texts: &mut HashSet<String>,
    documents: &mut Vec<Document>,
    skipped: &mut Skipped,
) -> Result<u64, CorpusError> {
    let mut taken = 0;
    let mut taken_of: HashMap<&Path, u64> = HashMap::new();
    for candidate in candidates {
        let of_package = taken_of.entry(&candidate.package.dir).or_default();
        let too_much = if candidate.bytes > MAX_FILE_BYTES {
            Some(&mut skipped.too_long)
        } else if taken + candidate.bytes > budget {
            Some(&mut skipped.beyond_budget)
        } else if *of_package + candidate.bytes > MAX_PACKAGE_BYTES {
            Some(&mut skipped.beyond_package)
        } else {
            None
        };
        if let Some(count) = too_much {
            *count += 1;
        } else if let Some(document) = read(candidate, texts, skipped)? {
            let bytes = document.text.len() as u64;
            *of_package += bytes;
            taken += bytes;
            documents.push(document);
        }
    }
    Ok(taken)
}

fn read(
    candidate: &Candidate<'_>,
    texts: &mut HashSet<String>,
    skipped: &mut Skipped,
) -> Result<Option<Document>, CorpusError> {
    let path = candidate.package.dir.join(&candidate.relative);
    let bytes = std::fs::read(&path).map_err(|source| CorpusError::Io {
        action: "read",
        path,
        source,
    })?;
    let Ok(text) = String::from_utf8(bytes) else {
        skipped.not_utf8 += 1;
        return Ok(None);
    };
    if text.trim().is_empty() {
        skipped.blank += 1;
        return Ok(None);
    }
    let text_hash = hex(&Sha256::digest(&text));
    if !texts.insert(text_hash.clone()) {
        skipped.repeated += 1;
        return Ok(None);
    }
    let Source { name, version, .. } = candidate.package;
    Ok(Some(Document {
        text,
        text_hash,
        file_path: candidate.file_path(),
        url: format!("pkg:cargo/{name}@{version}#{}", candidate.relative),
        kind: candidate.kind,
    }))
}

/// Lists a folder's Markdown and Rust files. Links are not followed: they could lead out of the
/// package, or round in a circle.
fn walk<'a>(
    package: &'a Source,
    folder: &Path,
    prefix: &str,
    candidates: &mut Vec<Candidate<'a>>,
    skipped: &mut Skipped,
) -> Result<(), CorpusError> {
    let io = |source| CorpusError::Io {
        action: "read",
        path: folder.to_owned(),
        source,
    };
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(io)?);
        let file_kind = Kind::of(&path).filter(|_| kind.is_file());
        if file_kind.is_none() && !kind.is_dir() {
            continue;
        }
        let Ok(name) = entry.file_name().into_string() else {
            skipped.not_utf8 += 1;
            continue;
        };
        let relative = format!("{prefix}{name}");
        if let Some(kind) = file_kind {
            let bytes = entry.metadata().map_err(io)?.len();
            let mut candidate = Candidate {
                package,
                relative,
                kind,
                bytes,
                rank: [0; 32],
            };
            candidate.rank = Sha256::digest(candidate.file_path()).into();
            candidates.push(candidate);
        } else {
            walk(package, &path, &format!("{relative}/"), candidates, skipped)?;
        }
    }
    Ok(())
}
