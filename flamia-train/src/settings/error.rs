//! What can be wrong with settings, and how it is told.

use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

/// Why settings could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The command line could not be parsed, or asked for help or the version.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// A settings file could not be read.
    #[error("cannot read the settings file {}: {source}; give --config a readable TOML file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A settings file is not TOML.
    #[error("the settings file {} is not valid TOML: {}", path.display(), .message.trim_end())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's message, with line and column.
        message: String,
    },
    /// A key or variable that is no setting.
    #[error("{place}: there is no setting {found}; the nearest is {nearest}")]
    Unknown {
        /// The file, or the environment.
        place: String,
        /// The key or variable found.
        found: String,
        /// The nearest one that exists.
        nearest: String,
    },
    /// A value of the wrong type.
    #[error("{place}: {key} must be {expected}, found {found}")]
    WrongType {
        /// The file, variable or flag.
        place: String,
        /// The setting's key.
        key: String,
        /// What it takes.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Values that are out of range or do not go together, one problem a line.
    #[error("{}", .0.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Problem>),
    /// The layers, each checked, did not merge: the table and the structs disagree.
    #[error("the settings could not be merged: {0}")]
    Merge(#[from] config::ConfigError),
    /// The settings cannot be written as TOML.
    #[error("the settings cannot be written as TOML: {0}")]
    Write(#[from] toml::ser::Error),
}

impl SettingsError {
    /// Prints the error to standard error, or help and version to standard output, and gives the
    /// exit code: 0 for help and version, else 2.
    pub fn report(&self) -> ExitCode {
        match self {
            Self::Usage(usage) => {
                // A closed pipe (`--help | head`) is no reason to fail.
                let _ = usage.print();
                u8::try_from(usage.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
            }
            Self::Invalid(problems) => {
                for problem in problems {
                    let _ = writeln!(io::stderr(), "error: {problem}");
                }
                ExitCode::from(2)
            }
            other => {
                let _ = writeln!(io::stderr(), "error: {other}");
                ExitCode::from(2)
            }
        }
    }
}

/// One rule that the merged settings break.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The settings that the rule is about: key, value and, unless a default, where it came from.
    pub fields: Vec<(&'static str, String, Option<String>)>,
    /// The rule, as a sentence.
    pub rule: String,
    /// What to do, unless the rule says so.
    pub fix: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, value, origin)) in self.fields.iter().enumerate() {
            let and = if i == 0 { "" } else { " and " };
            write!(f, "{and}{key} = {value}")?;
            if let Some(origin) = origin {
                write!(f, " ({origin})")?;
            }
        }
        write!(f, ": {}", self.rule)?;
        match &self.fix {
            Some(fix) => write!(f, "; {fix}"),
            None => Ok(()),
        }
    }
}
