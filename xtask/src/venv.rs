//! A virtual environment of our own under `target/`: whole or not there, made by one at a time.
//!
//! A marker file, written last and in one step, says that the installation was completed and what
//! it holds. A folder without a valid marker is a half environment and is removed.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::process::say;
use crate::python::Python;
use crate::surroundings::Surroundings;

#[derive(Debug, thiserror::Error)]
pub enum VenvError {
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} could not make a virtual environment at {}:\n{output}", .python.display(), .folder.display())]
    Create {
        python: PathBuf,
        folder: PathBuf,
        output: String,
    },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VenvError {
    let path = path.to_owned();
    move |source| VenvError::Io {
        action,
        path,
        source,
    }
}

/// The place of an environment, which may or may not be there.
#[derive(Clone, Debug)]
pub struct Venv {
    /// Holds the environment, its lock and its log.
    base: PathBuf,
}

impl Venv {
    /// The environment of this name under cargo's target folder.
    pub fn named(here: &Surroundings, name: &str) -> Self {
        Self {
            base: here.target.join(name),
        }
    }

    pub fn folder(&self) -> PathBuf {
        self.base.join("venv")
    }

    pub fn python(&self) -> PathBuf {
        self.folder().join("bin/python")
    }

    /// Where pip's output is kept.
    pub fn log(&self) -> PathBuf {
        self.base.join("pip.log")
    }

    fn marker(&self) -> PathBuf {
        self.folder().join("installed.json")
    }

    /// What was installed, if it was completed.
    pub fn installed<T: DeserializeOwned>(&self) -> Option<T> {
        let marker = fs::read(self.marker()).ok()?;
        serde_json::from_slice(&marker).ok()
    }

    /// Says that the environment is whole, and what it holds.
    pub fn mark_installed<T: Serialize>(&self, what: &T) -> Result<(), VenvError> {
        let marker = self.marker();
        let draft = marker.with_extension("draft");
        let write = || -> io::Result<()> {
            let mut file = File::create(&draft)?;
            serde_json::to_writer(&file, what)?;
            file.write_all(b"\n")?;
            // On the disk before the name is: a power cut must not leave an empty marker.
            file.sync_all()?;
            fs::rename(&draft, &marker)
        };
        write().map_err(io_error("write", &marker))
    }

    /// Waits until nobody else installs here, and keeps others out while the file lives.
    pub fn lock(&self) -> Result<File, VenvError> {
        fs::create_dir_all(&self.base).map_err(io_error("create", &self.base))?;
        let path = self.base.join("lock");
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(io_error("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                say(format_args!(
                    "another installation is under way (process {}); waiting for it",
                    holder.trim()
                ));
                file.lock().map_err(io_error("lock", &path))?;
            }
            Err(TryLockError::Error(source)) => return Err(io_error("lock", &path)(source)),
        }
        // For the message above only: what excludes others is the lock.
        let _ = file.set_len(0);
        let _ = file.rewind();
        let _ = writeln!(file, "{}", std::process::id());
        Ok(file)
    }

    /// Makes the environment anew, from nothing. The lock is asked for as proof that it is held.
    pub fn create(
        &self,
        here: &Surroundings,
        python: &Python,
        _lock: &File,
    ) -> Result<(), VenvError> {
        let folder = self.folder();
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("remove", &folder)(error));
            }
            Ok(()) => say(format_args!(
                "removed the unfinished environment at {}",
                here.shown(&folder)
            )),
            Err(_) => {}
        }
        let output = here
            .command(&python.executable)
            .args(["-m", "venv"])
            .arg(&folder)
            .output()
            .map_err(io_error("run", &python.executable))?;
        if output.status.success() {
            return Ok(());
        }
        let output = [output.stdout, output.stderr].concat();
        Err(VenvError::Create {
            python: python.executable.clone(),
            folder,
            output: String::from_utf8_lossy(&output).trim().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    #[test]
    fn an_environment_counts_once_its_marker_is_whole() {
        let machine = Machine::bare();
        let venv = Venv::named(&machine.here(), "env");
        assert_eq!(venv.installed::<Vec<u8>>(), None);
        machine.file("target/env/venv/bin/python", "");
        assert_eq!(venv.installed::<Vec<u8>>(), None);
        venv.mark_installed(&vec![1_u8, 2]).unwrap();
        assert_eq!(venv.installed::<Vec<u8>>(), Some(vec![1, 2]));
        machine.file("target/env/venv/installed.json", "[1, ");
        assert_eq!(venv.installed::<Vec<u8>>(), None);
    }

    #[test]
    fn creation_removes_what_a_killed_one_left() {
        let machine = Machine::bare();
        let left = machine.file("target/env/venv/lib/left", "");
        let answer = r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":null}"#;
        let python = machine.python("bin/python3", answer);
        let python = Python::at(&machine.here(), python).unwrap();
        let venv = Venv::named(&machine.here(), "env");
        let lock = venv.lock().unwrap();
        venv.create(&machine.here(), &python, &lock).unwrap();
        assert!(!left.exists());
    }

    #[test]
    fn the_lock_is_held_until_the_last_handle_goes() {
        let machine = Machine::bare();
        let venv = Venv::named(&machine.here(), "env");
        let lock = venv.lock().unwrap();
        let as_pip_holds_it = lock.try_clone().unwrap();
        drop(lock);
        let other = File::open(machine.path("target/env/lock")).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(as_pip_holds_it);
        other.try_lock().unwrap();
        let holder = fs::read_to_string(machine.path("target/env/lock")).unwrap();
        assert_eq!(holder.trim(), std::process::id().to_string());
    }

    #[test]
    fn a_failed_creation_shows_what_python_said() {
        let machine = Machine::bare();
        let script = "case \"$1\" in -m) echo 'no ensurepip'; exit 1;; esac\n\
            echo '{\"version\":\"3.12.1\",\"venv\":true,\"ensurepip\":true,\"pip\":true,\"tensorboard\":false,\"torch\":null}'";
        let executable = machine.script("python3", script);
        let python = Python::at(&machine.here(), executable).unwrap();
        let venv = Venv::named(&machine.here(), "env");
        let lock = venv.lock().unwrap();
        let error = venv.create(&machine.here(), &python, &lock).unwrap_err();
        assert!(error.to_string().contains("no ensurepip"), "{error}");
    }
}
