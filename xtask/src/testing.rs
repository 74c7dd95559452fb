//! A made-up machine: a temporary workspace, and a PATH that holds what a test puts there.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::surroundings::Surroundings;

pub struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    /// Nothing on PATH, nothing set.
    pub fn bare() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        fs::create_dir(folder.path().join("target")).unwrap();
        Self { folder }
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    pub fn here(&self) -> Surroundings {
        self.here_with(&[])
    }

    pub fn here_with(&self, vars: &[(&str, &Path)]) -> Surroundings {
        let path = (OsString::from("PATH"), self.path("bin").into_os_string());
        let vars = vars
            .iter()
            .map(|(name, value)| (OsString::from(name), value.as_os_str().to_owned()));
        Surroundings::new(
            vars.chain([path]),
            self.folder.path().to_owned(),
            self.path("target"),
        )
    }

    /// A shell script on PATH. Only the shell's builtins are there for it.
    pub fn script(&self, name: &str, body: &str) -> PathBuf {
        self.script_at(&format!("bin/{name}"), body)
    }

    pub fn script_at(&self, relative: &str, body: &str) -> PathBuf {
        let path = self.path(relative);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Written by another process: what is open here for writing, a child that another test
        // starts meanwhile has open too, and then the script cannot be run ("text file busy").
        let written = Command::new("/bin/sh")
            .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$0""#])
            .args([path.as_os_str(), OsStr::new(body)])
            .status()
            .unwrap();
        assert!(written.success());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    pub fn file(&self, relative: &str, text: &str) -> PathBuf {
        let path = self.path(relative);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// A folder that looks like libtorch as a wheel installs it.
    pub fn wheel(&self, relative: &str, version: &str) -> PathBuf {
        self.file(
            &format!("{relative}/version.py"),
            &format!("__version__ = '{version}'\n"),
        );
        self.libtorch_without_version(relative)
    }

    pub fn libtorch_without_version(&self, relative: &str) -> PathBuf {
        let library = if cfg!(target_os = "macos") {
            "libtorch_cpu.dylib"
        } else {
            "libtorch_cpu.so"
        };
        self.file(&format!("{relative}/lib/{library}"), "");
        self.file(
            &format!("{relative}/include/torch/csrc/api/include/torch/torch.h"),
            "",
        );
        self.path(relative)
    }

    /// A python3 that answers the probe with this JSON.
    pub fn python(&self, relative: &str, answer: &str) -> PathBuf {
        self.script_at(relative, &format!("echo '{answer}'"))
    }
}
