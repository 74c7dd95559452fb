//! Where libtorch is looked for, in order: LIBTORCH, the active python, our own environment.

use std::fmt;
use std::path::{Path, PathBuf};

use super::install::of_own_environment;
use super::version;
use super::{Libtorch, Source, WANTED};
use crate::python::Python;
use crate::surroundings::Surroundings;

/// What the search came to.
#[derive(Debug, Default)]
pub struct Found {
    pub libtorch: Option<Libtorch>,
    pub skipped: Vec<Skipped>,
}

/// A torch that is there and was not taken.
#[derive(Debug)]
pub struct Skipped {
    python: PathBuf,
    reason: Unfit,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { python, reason } = self;
        write!(f, "skipped the torch of {}: {reason}", python.display())
    }
}

/// Why a folder does not serve as libtorch.
#[derive(Debug, PartialEq, Eq)]
pub enum Unfit {
    NoSuchFolder,
    NoLibrary,
    NoHeaders,
    NoVersion,
    Version(String),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchFolder => write!(f, "there is no such folder"),
            Self::NoLibrary => write!(f, "it has no lib/{}", library("torch_cpu")),
            Self::NoHeaders => write!(f, "it has no include/torch"),
            Self::NoVersion => write!(f, "nothing in it tells its version"),
            Self::Version(found) => write!(f, "torch {WANTED} is wanted, and it is {found}"),
        }
    }
}

/// LIBTORCH is a statement by the user, and so never skipped in silence.
#[derive(Debug, thiserror::Error)]
#[error(
    "LIBTORCH is {}, and that is not a usable libtorch: {reason}.\n  To mend it: unset LIBTORCH, and torch {WANTED} is found or installed for you; or set it to the folder of a torch {WANTED} that holds lib/ and include/",
    .folder.display()
)]
pub struct FolderError {
    pub folder: PathBuf,
    pub reason: Unfit,
}

/// The file name of a shared library.
pub fn library(name: &str) -> String {
    format!(
        "{}{name}{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    )
}

/// The version of the libtorch in the folder, if it serves.
pub fn examine(folder: &Path) -> Result<String, Unfit> {
    if !folder.is_dir() {
        return Err(Unfit::NoSuchFolder);
    }
    if !folder.join("lib").join(library("torch_cpu")).exists() {
        return Err(Unfit::NoLibrary);
    }
    if !folder.join("include/torch").is_dir() {
        return Err(Unfit::NoHeaders);
    }
    let version = version::of_folder(folder).ok_or(Unfit::NoVersion)?;
    if version::is_wanted(&version) {
        Ok(version)
    } else {
        Err(Unfit::Version(version))
    }
}

/// Looks, and changes nothing.
pub fn find(here: &Surroundings) -> Result<Found, FolderError> {
    let mut found = Found::default();
    if let Some(folder) = here.var("LIBTORCH") {
        // Build scripts run in other folders than ours.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| PathBuf::from(folder));
        found.libtorch = match examine(&folder) {
            Ok(version) => Some(Libtorch {
                folder,
                version,
                source: Source::Variable,
            }),
            Err(reason) => return Err(FolderError { folder, reason }),
        };
        return Ok(found);
    }
    // No python is no obstacle to an environment that was installed before.
    if let Ok(Python { executable, has }) = Python::active(here)
        && let Some(folder) = has.torch
    {
        match examine(&folder) {
            Ok(version) => {
                found.libtorch = Some(Libtorch {
                    folder,
                    version,
                    source: Source::ActivePython(executable),
                });
                return Ok(found);
            }
            Err(reason) => found.skipped.push(Skipped {
                python: executable,
                reason,
            }),
        }
    }
    found.libtorch = of_own_environment(here);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libtorch::Kind;
    use crate::libtorch::install::Installed;
    use crate::testing::Machine;
    use crate::venv::Venv;

    /// A machine where all three sources hold a torch, of these versions.
    fn machine_with(python: &str, own: &str) -> Machine {
        let machine = Machine::bare();
        machine.wheel("libtorch", WANTED);
        let folder = machine.wheel("python/torch", python);
        let answer = format!(
            r#"{{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":"{}"}}"#,
            folder.display()
        );
        machine.python("bin/python3", &answer);
        machine.wheel(
            "target/libtorch-cpu/venv/lib/python3.12/site-packages/torch",
            own,
        );
        let installed = Installed {
            torch: "lib/python3.12/site-packages/torch".into(),
        };
        Venv::named(&machine.here(), "libtorch-cpu")
            .mark_installed(&installed)
            .unwrap();
        machine
    }

    fn source(here: &Surroundings) -> Option<Source> {
        find(here).unwrap().libtorch.map(|libtorch| libtorch.source)
    }

    #[test]
    fn the_order_of_sources() {
        let machine = machine_with(WANTED, WANTED);
        let variable = machine.path("libtorch");
        let with_variable = machine.here_with(&[("LIBTORCH", &variable)]);
        assert_eq!(source(&with_variable), Some(Source::Variable));
        let python = machine.path("bin/python3");
        assert_eq!(
            source(&machine.here()),
            Some(Source::ActivePython(python.clone()))
        );
        std::fs::remove_file(python).unwrap();
        assert_eq!(
            source(&machine.here()),
            Some(Source::OwnEnvironment(Kind::Cpu))
        );
        std::fs::remove_dir_all(machine.path("target/libtorch-cpu")).unwrap();
        assert_eq!(source(&machine.here()), None);
    }

    #[test]
    fn another_version_in_python_is_skipped_and_said() {
        let machine = machine_with("2.10.0+cu128", WANTED);
        let found = find(&machine.here()).unwrap();
        let libtorch = found.libtorch.unwrap();
        assert_eq!(libtorch.source, Source::OwnEnvironment(Kind::Cpu));
        let said = found.skipped[0].to_string();
        assert!(
            said.contains("2.11.0 is wanted, and it is 2.10.0+cu128"),
            "{said}"
        );
    }

    #[test]
    fn an_environment_that_lost_its_torch_or_its_marker_is_not_taken() {
        let machine = machine_with("2.10.0", WANTED);
        std::fs::remove_file(machine.path("target/libtorch-cpu/venv/installed.json")).unwrap();
        assert_eq!(source(&machine.here()), None);
        let machine = machine_with("2.10.0", WANTED);
        let torch = "target/libtorch-cpu/venv/lib/python3.12/site-packages/torch";
        std::fs::remove_dir_all(machine.path(torch)).unwrap();
        assert_eq!(source(&machine.here()), None);
        assert_eq!(source(&machine_with("2.10.0", "2.9.0").here()), None);
    }

    #[test]
    fn an_unusable_libtorch_variable_is_an_error_with_both_versions() {
        let machine = machine_with(WANTED, WANTED);
        let fails = |folder: &str| {
            let folder = machine.path(folder);
            find(&machine.here_with(&[("LIBTORCH", &folder)])).unwrap_err()
        };
        machine.wheel("other", "2.12.0");
        let other = fails("other");
        assert_eq!(other.reason, Unfit::Version("2.12.0".into()));
        let shown = other.to_string();
        for part in [WANTED, "2.12.0", "unset LIBTORCH"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(fails("nowhere").reason, Unfit::NoSuchFolder);
        assert_eq!(fails("bin").reason, Unfit::NoLibrary);
        machine.file(&format!("bare/lib/{}", library("torch_cpu")), "");
        assert_eq!(fails("bare").reason, Unfit::NoHeaders);
        machine.libtorch_without_version("unversioned");
        assert_eq!(fails("unversioned").reason, Unfit::NoVersion);
    }
}
