//! What a run is told: defaults < preset < `--config FILE.toml` < environment < flags.
//!
//! One table ([`table`]) holds every setting's key, type, default and help text; the structs, the
//! flags, the environment variables, the accepted file keys and the help all come from it.
//! Loading has two stages. The first reads each layer and refuses what is not a known key or has
//! the wrong type, naming where it was found. The second ([`Settings::validate`]) looks at the
//! merged settings and refuses values that do not go together.
//!
//! Nothing here needs libtorch, so that `cargo xtask` can teach and check settings before it is
//! installed.

mod choice;
mod error;
mod flags;
mod key;
mod layer;
mod numerics;
mod preset;
mod table;
#[cfg(test)]
mod tests;
mod validate;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

pub use choice::{
    Ablate, Attention, Auto, AutoSwitch, Device, KernelName, Named, Packing, Precision, Preset,
    Spelled, UnknownName,
};
pub use error::{Problem, SettingsError};
pub use flags::{command, split_nproc};
pub use key::{Key, Kind};
pub use table::{
    BatchSettings, CheckpointSettings, ComputeSettings, DistributedSettings, EvalSettings,
    GuardSettings, KernelSettings, LogSettings, ModelSettings, OptimSettings, Settings, keys,
};

use layer::Layer;
use preset::PRESET_PLACE;

/// How a run is to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// From its first step.
    New,
    /// From its last checkpoint.
    Resume {
        /// The run's folder, if it was named.
        out: Option<PathBuf>,
    },
}

impl Settings {
    /// Loads the settings of a new run from `args` (without the program's name) and this
    /// process's environment.
    ///
    /// # Errors
    /// [`SettingsError::Usage`] also stands for `--help` and `--version`; let
    /// [`SettingsError::report`] print it and choose the exit code.
    pub fn load(args: impl IntoIterator<Item = OsString>) -> Result<Self, SettingsError> {
        Self::load_from(args, std::env::vars_os())
    }

    /// [`Settings::load`] with the environment given as (name, value) pairs; names that do not
    /// start with `FLAMIA_` are ignored.
    ///
    /// # Errors
    /// As for [`Settings::load`].
    pub fn load_from(
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, SettingsError> {
        let settings = Self::merge(None, args, env)?;
        settings.validate()?;
        Ok(settings)
    }

    /// Whether `args` and the environment ask for a new run or for one that continues.
    ///
    /// The rules about values are not checked: some are about settings that only the continued run
    /// knows, which [`Settings::load_resuming`] takes in.
    ///
    /// # Errors
    /// As for [`Settings::load`].
    pub fn start(
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Start, SettingsError> {
        let settings = Self::merge(None, args, env)?;
        Ok(match settings.resume {
            true => Start::Resume { out: settings.out },
            false => Start::New,
        })
    }

    /// How several processes are to work together, which they must know before they can agree on the run:
    /// a run's saved settings do not count.
    ///
    /// # Errors
    /// As for [`Settings::load`].
    pub fn distributed(
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<DistributedSettings, SettingsError> {
        Ok(Self::merge(None, args, env)?.distributed)
    }

    /// Loads the settings of a run that continues: those in `saved`, a file written from
    /// [`Settings::to_toml`], stand between the defaults and `--config`.
    ///
    /// # Errors
    /// As for [`Settings::load`].
    pub fn load_resuming(
        saved: &Path,
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, SettingsError> {
        let settings = Self::merge(Some(saved), args, env)?;
        settings.validate()?;
        Ok(settings)
    }

    fn merge(
        saved: Option<&Path>,
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, SettingsError> {
        let flags = flags::parse(args)?;
        let mut layers = Vec::new();
        for path in saved.into_iter().chain(flags.config.as_deref()) {
            layers.push(Layer::file(path)?);
        }
        layers.push(Layer::environment(env)?);
        layers.push(flags.layer);
        let preset = layers.iter().rev().find_map(Layer::preset);
        layers.insert(
            0,
            preset
                .map(Layer::of_preset)
                .transpose()?
                .unwrap_or_default(),
        );

        let defaults = config::Config::try_from(&Self::default())?;
        let mut builder = config::Config::builder().add_source(defaults);
        for layer in &layers {
            builder = builder.add_source(layer.clone());
        }
        let mut settings: Self = builder.build()?.try_deserialize()?;
        settings.origins = layers.into_iter().flat_map(Layer::into_origins).collect();
        settings.shorten_warmup();
        Ok(settings)
    }

    /// A short run should not need a second flag: where nobody chose the warm-up, it is a fifth of
    /// a run that is shorter than it.
    fn shorten_warmup(&mut self) {
        let origin = self.origin("optim.warmup");
        let unchosen = origin.is_none_or(|origin| origin.starts_with(PRESET_PLACE));
        if unchosen && self.optim.warmup > self.steps {
            self.optim.warmup = self.steps / 5;
            self.origins
                .insert("optim.warmup", "a fifth of the steps".into());
        }
    }

    /// The settings as a TOML file that loads to the same settings.
    ///
    /// # Errors
    /// TOML has no words for a path that is not UTF-8 or for a seed past `i64::MAX`; loaded
    /// settings hold neither.
    pub fn to_toml(&self) -> Result<String, SettingsError> {
        Ok(toml::to_string(self)?)
    }

    /// Where the value of the setting `path` (`model.dim`) came from; `None` for a default.
    #[must_use]
    pub fn origin(&self, path: &str) -> Option<&str> {
        self.origins.get(path).map(String::as_str)
    }

    /// Every setting with its value, by group, and where each one came from that is no default.
    #[must_use]
    pub fn describe(&self) -> String {
        let values = self.values();
        let width = |of: fn(&(&'static Key, String)) -> usize| values.iter().map(of).max();
        let name_width = width(|(key, _)| key.name().len()).unwrap_or_default();
        let mut text = String::new();
        let mut group = "";
        for (key, value) in &values {
            if key.group != group {
                group = key.group;
                let _ = writeln!(text, "{group}");
            }
            let _ = write!(text, "  {:name_width$}  {value}", key.name());
            if let Some(origin) = self.origin(key.path) {
                let _ = write!(text, "  ({origin})");
            }
            text.push('\n');
        }
        text
    }
}
