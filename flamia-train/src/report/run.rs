//! A run as its folder tells it, whether it is finished or still going on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use toml::Table;

use super::{Along, ReportError};
use crate::curves::{Curve, TOKENS, read_curves};

/// What is known of a run.
#[derive(Debug)]
pub struct RunRecord {
    /// The folder's own name.
    pub name: String,
    /// The folder.
    pub folder: PathBuf,
    /// Every setting by its dotted key, as in a settings file.
    pub settings: BTreeMap<String, String>,
    /// `summary.json`, once the run has ended.
    pub summary: Option<Value>,
    curves: BTreeMap<String, Curve>,
}

impl RunRecord {
    /// Reads the run in `folder`.
    ///
    /// # Errors
    /// [`ReportError`], naming the file that is missing or cannot be understood.
    pub fn read(folder: &Path) -> Result<Self, ReportError> {
        let path = folder.join("settings.toml");
        let Some(text) = read_if_there(&path)? else {
            return Err(ReportError::NoRun {
                path: folder.into(),
            });
        };
        let table: Table = text.parse().map_err(failure(&path))?;
        let mut settings = BTreeMap::new();
        flatten("", &table, &mut settings);

        let path = folder.join("summary.json");
        let summary: Option<Value> = read_if_there(&path)?
            .map(|text| serde_json::from_str(&text).map_err(failure(&path)))
            .transpose()?;
        // A run that was resumed from an old checkpoint may have points past its last step.
        let last_step = summary
            .as_ref()
            .and_then(|summary| summary["steps"].as_u64());
        let absolute = fs::canonicalize(folder).map_err(failure(folder))?;
        let name = absolute.file_name().unwrap_or(absolute.as_os_str());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            folder: folder.into(),
            settings,
            summary,
            curves: read_curves(folder, last_step.unwrap_or(u64::MAX))?,
        })
    }

    /// The curve `tag`, empty if there is none, along steps or along millions of tokens.
    pub fn curve(&self, tag: &str, along: Along) -> Curve {
        let points = self.curves.get(tag).cloned().unwrap_or_default();
        if along == Along::Steps {
            return points;
        }
        let tokens = self.curves.get(TOKENS);
        let tokens: BTreeMap<u64, f64> = tokens
            .into_iter()
            .flatten()
            .map(|&(step, tokens)| (step as u64, tokens / 1e6))
            .chain([(0, 0.0)])
            .collect();
        points
            .into_iter()
            .filter_map(|(step, value)| Some((*tokens.get(&(step as u64))?, value)))
            .collect()
    }

    /// The unit of its losses, if it has ended.
    pub fn unit(&self) -> Option<&str> {
        self.summary.as_ref()?["unit"].as_str()
    }

    /// The value at the dotted `key` of the summary.
    pub fn result(&self, key: &str) -> Option<&Value> {
        let summary = self.summary.as_ref()?;
        key.split('.')
            .try_fold(summary, |value, name| value.get(name))
            .filter(|value| !value.is_null())
    }
}

fn failure<E: ToString>(path: &Path) -> impl FnOnce(E) -> ReportError {
    move |reason| ReportError::File {
        path: path.into(),
        reason: reason.to_string(),
    }
}

fn read_if_there(path: &Path) -> Result<Option<String>, ReportError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failure(path)(error)),
    }
}

fn flatten(prefix: &str, table: &Table, flat: &mut BTreeMap<String, String>) {
    for (key, value) in table {
        let key = format!("{prefix}{key}");
        match value {
            toml::Value::Table(table) => flatten(&format!("{key}."), table, flat),
            toml::Value::String(text) => drop(flat.insert(key, text.clone())),
            value => drop(flat.insert(key, value.to_string())),
        }
    }
}
