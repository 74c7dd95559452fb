//! Running pip: its progress shown, its whole output in a log, its failures told apart.

mod failure;
mod progress;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

pub use failure::{Cause, PipError};

use crate::pip::progress::{Display, Line};
use crate::surroundings::Surroundings;

/// The first pip with `--progress-bar raw`.
const WITH_RAW_PROGRESS: &str = "pip>=24.1";

/// The pip of one virtual environment.
pub struct Pip<'a> {
    here: &'a Surroundings,
    python: PathBuf,
    log: PathBuf,
    /// Becomes pip's standard input, so that a pip that outlives us still holds the lock.
    lock: &'a File,
    raw_progress: bool,
}

impl<'a> Pip<'a> {
    /// The pip of the environment with this python, brought up to what is used of it here. That
    /// is a small download, and so finds out early whether there is a network.
    pub fn prepare(
        here: &'a Surroundings,
        python: &Path,
        log: &Path,
        lock: &'a File,
    ) -> Result<Self, PipError> {
        let mut pip = Self {
            here,
            python: python.to_owned(),
            log: log.to_owned(),
            lock,
            raw_progress: false,
        };
        match pip.install(&[WITH_RAW_PROGRESS.to_owned()], &[]) {
            Ok(()) => pip.raw_progress = true,
            // An index without a newer pip is no obstacle: only the progress bar is lost.
            Err(error) if matches!(error.cause(), Some(Cause::NoMatch | Cause::Other)) => {}
            Err(error) => return Err(error),
        }
        Ok(pip)
    }

    /// Installs the requirements. Where from is the user's pip configuration's to say.
    pub fn install(&self, requirements: &[String], options: &[&str]) -> Result<(), PipError> {
        let failed_to_run = |source| PipError::Run {
            python: self.python.clone(),
            source,
        };
        let (reader, writer) = std::io::pipe().map_err(failed_to_run)?;
        let bar = if self.raw_progress { "raw" } else { "off" };
        let mut command = self.here.command(&self.python);
        command
            .args([
                "-m",
                "pip",
                "install",
                "--no-input",
                "--disable-pip-version-check",
            ])
            .args(["--progress-bar", bar])
            .args(options)
            .args(requirements)
            // These would install elsewhere than into the environment, or count what lies
            // elsewhere as installed.
            .env("PIP_USER", "0")
            .env("PYTHONUNBUFFERED", "1")
            .env_remove("PIP_TARGET")
            .env_remove("PIP_PREFIX")
            .env_remove("PYTHONPATH")
            .env_remove("PYTHONHOME")
            .stdin(Stdio::from(self.lock.try_clone().map_err(failed_to_run)?))
            .stdout(writer.try_clone().map_err(failed_to_run)?)
            .stderr(writer);
        let mut child = command.spawn().map_err(failed_to_run)?;
        // The command holds our ends of the pipe, and the reader ends when all are closed.
        drop(command);

        let cannot_log = |source| PipError::Log {
            log: self.log.clone(),
            source,
        };
        let mut log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .map_err(cannot_log)?;
        writeln!(log, "== pip install {}", requirements.join(" ")).map_err(cannot_log)?;

        let mut display = Display::new();
        let mut said = String::new();
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line);
            let line = Line::parse(&text);
            display.show(&line);
            if !matches!(line, Line::Progress { .. }) {
                // A full disk fails pip as well, and its own words are the better message.
                let _ = writeln!(log, "{text}");
                said.push_str(&text);
                said.push('\n');
            }
        }
        let status = child.wait().map_err(failed_to_run)?;
        display.clear();
        if status.success() {
            return Ok(());
        }
        Err(PipError::failed(
            requirements,
            &said,
            &self.log,
            &self.python,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    /// A pip that writes down what it was asked, and fails with `failure` on torch.
    fn fake_pip(machine: &Machine, failure: &str) -> PathBuf {
        let script = format!(
            "echo \"$@ user=$PIP_USER target=$PIP_TARGET path=$PYTHONPATH\" >> {}\n\
             case \"$*\" in *torch*) {failure};; esac\n\
             echo 'Progress 1 of 2'; echo done",
            machine.path("asked").display()
        );
        machine.script("python", &script)
    }

    fn prepare_and_install(machine: &Machine, failure: &str) -> Result<(), PipError> {
        let python = fake_pip(machine, failure);
        let lock = File::create(machine.path("lock")).unwrap();
        let here = machine.here_with(&[
            ("PIP_TARGET", Path::new("/elsewhere")),
            ("PYTHONPATH", Path::new("/elsewhere")),
        ]);
        let pip = Pip::prepare(&here, &python, &machine.path("pip.log"), &lock)?;
        pip.install(&["torch==2.11.0".to_owned()], &["--no-deps"])
    }

    #[test]
    fn what_would_divert_pip_from_the_environment_is_taken_away() {
        let machine = Machine::bare();
        prepare_and_install(&machine, ":").unwrap();
        let asked = std::fs::read_to_string(machine.path("asked")).unwrap();
        let torch = asked.lines().find(|line| line.contains("torch")).unwrap();
        assert!(
            torch.contains("--progress-bar raw --no-deps torch==2.11.0"),
            "{torch}"
        );
        assert!(torch.ends_with("user=0 target= path="), "{torch}");
    }

    #[test]
    fn the_log_keeps_everything_but_the_progress() {
        let machine = Machine::bare();
        prepare_and_install(&machine, ":").unwrap();
        let log = std::fs::read_to_string(machine.path("pip.log")).unwrap();
        assert!(
            log.contains("== pip install torch==2.11.0\ndone\n"),
            "{log}"
        );
        assert!(!log.contains("Progress"), "{log}");
    }

    #[test]
    fn a_failure_is_told_with_its_cause_and_the_log() {
        let machine = Machine::bare();
        let failure = "echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1";
        let error = prepare_and_install(&machine, failure).unwrap_err();
        assert_eq!(error.cause(), Some(Cause::NoSpace));
        let shown = error.to_string();
        assert!(
            shown.contains(&machine.path("pip.log").display().to_string()),
            "{shown}"
        );
    }
}
