//! One source of settings, checked against the table before it is merged with the others.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;

use config::{ConfigError, File, FileFormat, Source, Value, ValueKind};

use super::error::SettingsError;
use super::key::{Key, found};
use super::table::keys;

/// Variables that the kernels' runtime reads: its compiler and its cache. A test holds them against
/// `flamia_cuda::ENVIRONMENT`.
const OF_KERNELS: [&str; 2] = ["FLAMIA_NVRTC", "FLAMIA_KERNEL_CACHE"];

/// Values from one source, each with its key and the place that set it.
#[derive(Debug, Clone, Default)]
pub(super) struct Layer {
    values: Vec<(&'static Key, ValueKind, String)>,
}

impl Layer {
    /// The settings in the TOML file at `path`.
    pub(super) fn file(path: &Path) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
            path: path.into(),
            source,
        })?;
        let tables = File::from_str(&text, FileFormat::Toml).collect();
        let tables = tables.map_err(|error| SettingsError::Syntax {
            path: path.into(),
            message: match error {
                ConfigError::FileParse { cause, .. } => cause.to_string(),
                other => other.to_string(),
            },
        })?;

        let mut layer = Self::default();
        layer.add_table("", tables, &path.display().to_string())?;
        // A hash map's order is no order in which to report anything.
        layer.values.sort_by_key(|(key, ..)| key.path);
        Ok(layer)
    }

    fn add_table(
        &mut self,
        section: &str,
        table: HashMap<String, Value>,
        place: &str,
    ) -> Result<(), SettingsError> {
        let mut entries: Vec<_> = table.into_iter().collect();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, value) in entries {
            let path = if section.is_empty() {
                name
            } else {
                format!("{section}.{name}")
            };
            if let Some(key) = keys().iter().find(|key| key.path == path) {
                let shown = found(&value);
                let value = key.kind.check(value.kind);
                self.add(key, value, place.into(), shown)?;
                continue;
            }
            let is_section = keys().iter().any(|key| key.section() == Some(&*path));
            match value.kind {
                ValueKind::Table(inner) if is_section || !inner.is_empty() => {
                    self.add_table(&path, inner, place)?;
                }
                _ if is_section => {
                    return Err(SettingsError::WrongType {
                        place: place.into(),
                        expected: format!("a table, [{path}]"),
                        found: found(&value),
                        key: path,
                    });
                }
                ValueKind::Table(_) | ValueKind::Array(_) => {
                    let section = |key: &'static Key| key.section().unwrap_or(key.path);
                    return Err(unknown(place, &path, section));
                }
                _ => return Err(unknown(place, &path, |key| key.path)),
            }
        }
        Ok(())
    }

    /// The settings among the variables of an environment.
    pub(super) fn environment(
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, SettingsError> {
        let mut layer = Self::default();
        for (name, value) in env {
            let name = name.to_string_lossy();
            if !name.starts_with("FLAMIA_") || OF_KERNELS.contains(&&*name) {
                continue;
            }
            let Some(key) = keys().iter().find(|key| key.variable == name) else {
                return Err(unknown("environment", &name, |key| &key.variable));
            };
            let shown = format!("{value:?}");
            let value = value.to_str().and_then(|text| key.kind.parse(text));
            layer.add(key, value, format!("environment {name}"), shown)?;
        }
        Ok(layer)
    }

    /// Adds the value that the flag of `key` spells.
    pub(super) fn add_flag(&mut self, key: &'static Key, text: &str) -> Result<(), SettingsError> {
        let place = format!("flag --{}", key.flag);
        self.add(key, key.kind.parse(text), place, format!("{text:?}"))
    }

    /// Adds the value that `text` spells for the setting `path`, from `place`.
    pub(super) fn add_known(
        &mut self,
        path: &str,
        text: &str,
        place: &str,
    ) -> Result<(), SettingsError> {
        match keys().iter().find(|key| key.path == path) {
            Some(key) => self.add(key, key.kind.parse(text), place.into(), format!("{text:?}")),
            None => Err(unknown(place, path, |key| key.path)),
        }
    }

    /// The value of the setting `path`, if this source has one.
    pub(super) fn value(&self, path: &str) -> Option<&ValueKind> {
        let of_path = |(key, ..): &&(&'static Key, ValueKind, String)| key.path == path;
        self.values.iter().find(of_path).map(|(_, value, _)| value)
    }

    fn add(
        &mut self,
        key: &'static Key,
        value: Option<ValueKind>,
        place: String,
        found: String,
    ) -> Result<(), SettingsError> {
        let Some(value) = value else {
            return Err(SettingsError::WrongType {
                place,
                key: key.path.into(),
                expected: key.kind.expected(),
                found,
            });
        };
        self.values.push((key, value, place));
        Ok(())
    }

    /// Which key was set where.
    pub(super) fn into_origins(self) -> impl Iterator<Item = (&'static str, String)> {
        self.values
            .into_iter()
            .map(|(key, _, place)| (key.path, place))
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<HashMap<String, Value>, ConfigError> {
        let entry = |(key, value, place): &(&'static Key, ValueKind, String)| {
            (key.path.into(), Value::new(Some(place), value.clone()))
        };
        Ok(self.values.iter().map(entry).collect())
    }
}

/// The refusal of `found`, with the one of all settings' spellings that is most like it. A right
/// name in a wrong section (`dim` for `model.dim`) is nearer than any likeness.
fn unknown(
    place: &str,
    found: &str,
    spelling: impl Fn(&'static Key) -> &'static str,
) -> SettingsError {
    let name = |path: &str| path.rsplit('.').next().map(str::to_string);
    let likeness = |known: &str| {
        let same_name = f64::from(u8::from(name(known) == name(found)));
        same_name + strsim::normalized_damerau_levenshtein(known, found)
    };
    let known = keys().iter().map(spelling);
    let nearest = known.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    SettingsError::Unknown {
        place: place.into(),
        found: found.into(),
        nearest: nearest.unwrap_or_default().into(),
    }
}
