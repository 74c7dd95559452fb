//! The environment variables and folders that every decision is taken from, as one value, so that
//! tests can make up a machine.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use serde::Deserialize;

/// A view of the machine: environment variables, and the workspace's folders.
#[derive(Clone, Debug)]
pub struct Surroundings {
    vars: BTreeMap<OsString, OsString>,
    /// The root of the workspace.
    pub root: PathBuf,
    /// Cargo's target folder, where everything that is set up lives.
    pub target: PathBuf,
}

#[derive(Deserialize)]
struct CargoFolders {
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

impl Surroundings {
    pub fn new(
        vars: impl IntoIterator<Item = (OsString, OsString)>,
        root: PathBuf,
        target: PathBuf,
    ) -> Self {
        let vars = vars.into_iter().collect();
        Self { vars, root, target }
    }

    /// Asks cargo, who alone knows where a CARGO_TARGET_DIR or a configuration file puts `target`.
    pub fn of_this_process() -> anyhow::Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let mut here = Self::new(std::env::vars_os(), PathBuf::new(), PathBuf::new());
        let output = here
            .cargo()?
            .args([
                "metadata",
                "--no-deps",
                "--format-version=1",
                "--manifest-path",
            ])
            .arg(&manifest)
            .output()
            .context("cannot run `cargo metadata`")?;
        let folders: CargoFolders = serde_json::from_slice(&output.stdout).with_context(|| {
            format!(
                "`cargo metadata` for {} failed: {}",
                manifest.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            )
        })?;
        here.root = folders.workspace_root;
        here.target = folders.target_directory;
        Ok(here)
    }

    /// The value of an environment variable; an empty one counts as unset.
    pub fn var(&self, name: &str) -> Option<&OsStr> {
        let value = self.vars.get(OsStr::new(name))?;
        (!value.is_empty()).then_some(value)
    }

    /// The program's path, searched on PATH.
    pub fn find(&self, program: impl AsRef<OsStr>) -> Option<PathBuf> {
        which::which_in(program, self.var("PATH"), &self.root).ok()
    }

    /// A command that sees these variables and no others.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().envs(&self.vars);
        command
    }

    /// The cargo that runs us, else the one on PATH.
    pub fn cargo(&self) -> anyhow::Result<Command> {
        let cargo = self
            .var("CARGO")
            .map(PathBuf::from)
            .or_else(|| self.find("cargo"));
        let cargo = cargo.context("cargo is not on PATH; install Rust from https://rustup.rs")?;
        Ok(self.command(cargo))
    }

    /// The path as a reader of messages wants it: relative to the workspace where it is inside.
    pub fn shown(&self, path: &Path) -> String {
        let relative = path.strip_prefix(&self.root).unwrap_or(path);
        relative.display().to_string()
    }
}
