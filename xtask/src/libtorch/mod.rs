//! libtorch: the one that is there, or else one that is installed.

mod install;
mod source;
mod version;

use std::path::PathBuf;
use std::process::Command;

use serde::Serialize;

use crate::compiler::{self, Compiler, CompilerError};
use crate::cuda::Driver;
use crate::nvrtc;
use crate::pip::PipError;
use crate::process::say;
use crate::python::PythonError;
use crate::surroundings::Surroundings;
use crate::venv::VenvError;

pub use install::{Kind, free_space, space_needed};
pub use source::{FolderError, Found, find};

/// The torch that tch 0.24 is made for; it takes no other.
pub const WANTED: &str = "2.11.0";

/// Every torch 2.11 is built with libstdc++'s new ABI; there is no other to tell apart.
pub const CXX11_ABI: &str = "1";

/// Where a libtorch comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The environment variable LIBTORCH.
    Variable,
    /// The torch of the active python, whose path this is.
    ActivePython(PathBuf),
    /// Our environment under `target/`.
    OwnEnvironment(Kind),
}

impl Source {
    pub fn named(&self) -> String {
        match self {
            Self::Variable => "from LIBTORCH".to_owned(),
            Self::ActivePython(python) => format!("of the active python, {}", python.display()),
            Self::OwnEnvironment(_) => "in our own environment".to_owned(),
        }
    }
}

/// A libtorch of the wanted version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libtorch {
    /// Holds `lib/` and `include/`.
    pub folder: PathBuf,
    /// With its local part, as in `2.11.0+cu130`.
    pub version: String,
    pub source: Source,
}

impl Libtorch {
    pub fn has_cuda(&self) -> bool {
        self.folder
            .join("lib")
            .join(source::library("torch_cuda"))
            .exists()
    }

    /// Version, origin and build, in one line.
    pub fn described(&self) -> String {
        let cuda = if self.has_cuda() {
            "with CUDA"
        } else {
            "without CUDA"
        };
        format!("{} {}, {cuda}", self.version, self.source.named())
    }
}

/// What stands between this machine and a build that links libtorch.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    #[error(transparent)]
    Compiler(#[from] CompilerError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Python(#[from] PythonError),
    #[error(transparent)]
    Venv(#[from] VenvError),
    #[error(transparent)]
    Pip(#[from] PipError),
    #[error(
        "installing libtorch {WANTED} needs about {} of free disk space, and {} has {}.\n  To mend it: free some space, or set CARGO_TARGET_DIR to a folder on a larger disk",
        gigabytes(*.needed), .folder.display(), gigabytes(*.free)
    )]
    Space {
        folder: PathBuf,
        needed: u64,
        free: u64,
    },
    #[error(
        "the torch that pip installed does not load: {output}\n  To mend it: `rm -r {}` and run the same command again; if it fails again, install torch {WANTED} yourself and set LIBTORCH to its folder",
        .folder.display()
    )]
    DoesNotLoad { folder: PathBuf, output: String },
    #[error(
        "pip reported success, and there is no NVRTC in {}\n  To mend it: run the same command again; if it fails again, install NVRTC 13.0 yourself and set {} to its folder",
        .folder.display(), nvrtc::SETTING
    )]
    NoNvrtc { folder: PathBuf },
}

/// `1.3 GB`.
pub fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// A machine that is ready to build what links libtorch.
pub struct Ready {
    pub libtorch: Libtorch,
    /// Where NVRTC is, unless that goes without saying.
    nvrtc: Option<PathBuf>,
    compiler: Compiler,
}

impl Ready {
    /// The environment variables that make cargo build against this libtorch, and that programs
    /// find NVRTC by: what to set, and what to remove because it would overrule LIBTORCH.
    ///
    /// They are the same from run to run, since a change has torch-sys built again.
    pub fn variables(&self) -> (Vec<(&'static str, String)>, &'static [&'static str]) {
        let mut set = vec![
            ("LIBTORCH", self.libtorch.folder.display().to_string()),
            ("LIBTORCH_CXX11_ABI", CXX11_ABI.to_owned()),
        ];
        if self.compiler.needs_cxx {
            set.push(("CXX", self.compiler.command.clone()));
        }
        if let Some(nvrtc) = &self.nvrtc {
            set.push((nvrtc::SETTING, nvrtc.display().to_string()));
        }
        (
            set,
            &["LIBTORCH_USE_PYTORCH", "LIBTORCH_LIB", "LIBTORCH_INCLUDE"],
        )
    }

    /// Gives the command that environment.
    pub fn apply(&self, command: &mut Command) {
        let (set, remove) = self.variables();
        command.envs(set);
        for name in remove {
            command.env_remove(name);
        }
    }
}

/// Finds libtorch and NVRTC, or installs them. Nothing is asked of the network where
/// they are found.
pub fn set_up(here: &Surroundings) -> Result<Ready, SetUpError> {
    // Before what may be a long download.
    let compiler = compiler::find(here)?;
    let found = find(here)?;
    for skipped in &found.skipped {
        say(skipped);
    }
    let driver = Driver::probe();
    let libtorch = match found.libtorch {
        Some(found) => install::upgrade_for(here, &driver, found),
        None => install::install(here, Kind::for_driver(&driver))?,
    };
    say(format_args!(
        "libtorch {} ({})",
        libtorch.described(),
        here.shown(&libtorch.folder)
    ));
    let nvrtc = nvrtc::set_up(here, &libtorch.folder);
    Ok(Ready {
        libtorch,
        nvrtc,
        compiler,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    #[test]
    fn the_compiler_is_checked_before_anything_is_installed() {
        let machine = Machine::bare();
        assert!(matches!(
            set_up(&machine.here()),
            Err(SetUpError::Compiler(_))
        ));
        assert_eq!(
            std::fs::read_dir(machine.path("target")).unwrap().count(),
            0
        );
    }

    #[test]
    fn without_libtorch_and_without_python_the_remedy_is_named() {
        let machine = Machine::bare();
        machine.script("c++", "");
        let Err(error) = set_up(&machine.here()) else {
            panic!("nothing can be set up without python");
        };
        assert!(
            matches!(error, SetUpError::Python(PythonError::Missing { .. })),
            "{error}"
        );
    }

    #[test]
    fn cargo_gets_the_folder_and_loses_what_overrules_it() {
        let machine = Machine::bare();
        machine.script("g++", "");
        let torch = machine.wheel("site-packages/torch", "2.11.0+cpu");
        let here = machine.here_with(&[
            ("LIBTORCH", &torch),
            ("LIBTORCH_USE_PYTORCH", std::path::Path::new("1")),
            ("FLAMIA_NVRTC", &machine.path("nvrtc")),
        ]);
        let ready = set_up(&here).unwrap();
        let mut command = here.command("cargo");
        ready.apply(&mut command);
        let value = |name: &str| {
            let mut pairs = command.get_envs();
            pairs
                .find(|(key, _)| *key == name)
                .and_then(|(_, value)| value.map(ToOwned::to_owned))
        };
        assert_eq!(value("LIBTORCH"), Some(torch.into_os_string()));
        assert_eq!(value("LIBTORCH_CXX11_ABI"), Some("1".into()));
        assert_eq!(value("CXX"), Some("g++".into()));
        assert_eq!(value("LIBTORCH_USE_PYTORCH"), None);
        assert_eq!(
            value("FLAMIA_NVRTC"),
            Some(machine.path("nvrtc").into_os_string())
        );
    }
}
