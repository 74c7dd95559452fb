//! The Python that is active, and what it has, asked without importing anything slow.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::remedy;
use crate::surroundings::Surroundings;

/// An interpreter and its answer to [`PROBE`].
#[derive(Clone, Debug)]
pub struct Python {
    pub executable: PathBuf,
    pub has: Contents,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Contents {
    pub version: String,
    pub venv: bool,
    pub ensurepip: bool,
    pub pip: bool,
    pub tensorboard: bool,
    /// The folder of its torch, which is libtorch's folder in a wheel.
    pub torch: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum PythonError {
    #[error(
        "no python3 on PATH, and torch is installed with pip.\n  To mend it: {remedy}\n  or set LIBTORCH to the folder of a torch {} you have",
        crate::libtorch::WANTED
    )]
    Missing { remedy: String },
    #[error("{} does not run: {output}\n  To mend it: repair it, or put a working python3 first on PATH", .executable.display())]
    Broken { executable: PathBuf, output: String },
    #[error("{} (Python {version}) cannot make virtual environments: its {module} module is missing.\n  To mend it: {remedy}", .executable.display())]
    NoVenv {
        executable: PathBuf,
        version: String,
        module: &'static str,
        remedy: String,
    },
}

/// `find_spec` locates a package without running it; importing torch would take seconds. The
/// current folder is left out: a folder called `torch` there is not an installation.
const PROBE: &str = r#"
import sys
sys.path = [p for p in sys.path if p]
import importlib.util, json, os
def spec(name):
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
torch = spec("torch")
print(json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3],
    "venv": spec("venv") is not None,
    "ensurepip": spec("ensurepip") is not None,
    "pip": spec("pip") is not None,
    "tensorboard": spec("tensorboard") is not None,
    "torch": os.path.dirname(torch.origin) if torch and torch.origin else None,
}))
"#;

impl Python {
    /// The python of the active environment, else python3 on PATH.
    pub fn active(here: &Surroundings) -> Result<Self, PythonError> {
        let of_environment = ["VIRTUAL_ENV", "CONDA_PREFIX"]
            .iter()
            .filter_map(|name| here.var(name))
            .map(|prefix| Path::new(prefix).join("bin/python"))
            .find(|python| python.exists());
        let executable = of_environment
            .or_else(|| here.find("python3"))
            .ok_or_else(|| PythonError::Missing {
                remedy: remedy::PYTHON.command(here),
            })?;
        Self::at(here, executable)
    }

    pub fn at(here: &Surroundings, executable: PathBuf) -> Result<Self, PythonError> {
        let output = match here.command(&executable).args(["-c", PROBE]).output() {
            Ok(output) => output,
            Err(error) => {
                let output = error.to_string();
                return Err(PythonError::Broken { executable, output });
            }
        };
        match serde_json::from_slice(&output.stdout) {
            Ok(has) if output.status.success() => Ok(Self { executable, has }),
            _ => Err(PythonError::Broken {
                executable,
                output: format!(
                    "{} {}",
                    output.status,
                    String::from_utf8_lossy(&output.stderr).trim()
                ),
            }),
        }
    }

    /// An error that names the missing module unless this Python can make virtual environments.
    pub fn require_venv(&self, here: &Surroundings) -> Result<(), PythonError> {
        // Debian splits both out of python3; `import venv` alone may still work there.
        let modules = [("venv", self.has.venv), ("ensurepip", self.has.ensurepip)];
        match modules.into_iter().find(|(_, there)| !there) {
            None => Ok(()),
            Some((module, _)) => Err(PythonError::NoVenv {
                executable: self.executable.clone(),
                version: self.has.version.clone(),
                module,
                remedy: remedy::VENV_MODULE.command(here),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    const ANSWER: &str = r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":null}"#;

    #[test]
    fn the_active_environment_comes_before_path() {
        let machine = Machine::bare();
        machine.python("bin/python3", &ANSWER.replace("3.12.1", "3.10.0"));
        let on_path = Python::active(&machine.here()).unwrap();
        assert_eq!(on_path.has.version, "3.10.0");
        machine.python("env/bin/python", ANSWER);
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            let here = machine.here_with(&[(variable, &machine.path("env"))]);
            assert_eq!(Python::active(&here).unwrap().has.version, "3.12.1");
        }
        // An environment that has been deleted since it was activated.
        let here = machine.here_with(&[("VIRTUAL_ENV", &machine.path("gone"))]);
        assert_eq!(Python::active(&here).unwrap().has.version, "3.10.0");
    }

    #[test]
    fn none_and_a_broken_one_are_told_apart() {
        let machine = Machine::bare();
        let missing = Python::active(&machine.here()).unwrap_err();
        assert!(matches!(missing, PythonError::Missing { .. }));
        machine.script("python3", "echo 'no module named encodings' >&2; exit 1");
        let broken = Python::active(&machine.here()).unwrap_err();
        assert!(matches!(broken, PythonError::Broken { .. }));
        assert!(
            broken.to_string().contains("no module named encodings"),
            "{broken}"
        );
    }

    #[test]
    fn a_python_without_ensurepip_names_the_package() {
        let machine = Machine::bare();
        machine.python(
            "bin/python3",
            &ANSWER.replace("\"ensurepip\":true", "\"ensurepip\":false"),
        );
        let python = Python::active(&machine.here()).unwrap();
        let error = python
            .require_venv(&machine.here())
            .unwrap_err()
            .to_string();
        assert!(error.contains("ensurepip module is missing"), "{error}");
        assert!(
            error.contains(&remedy::VENV_MODULE.command(&machine.here())),
            "{error}"
        );
    }

    #[test]
    fn the_probe_runs_on_a_real_python_where_there_is_one() {
        let Ok(executable) = which::which("python3") else {
            eprintln!("skipped: there is no python3 on PATH");
            return;
        };
        let vars = std::env::vars_os();
        let here = Surroundings::new(vars, std::env::temp_dir(), std::env::temp_dir());
        let python = Python::at(&here, executable).unwrap();
        assert!(python.has.version.starts_with("3."));
    }
}
