//! TensorBoard on the runs: the one that is there, or one of our own.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::bail;

use crate::pip::Pip;
use crate::process::{become_command, say};
use crate::python::Python;
use crate::surroundings::Surroundings;
use crate::venv::Venv;

/// TensorBoard 2.20 imports `pkg_resources`, which setuptools 81 announces the end of.
const REQUIREMENTS: [&str; 2] = ["tensorboard", "setuptools<81"];

/// Apart from libtorch's environment, so that the two come and go independently.
fn own_environment(here: &Surroundings) -> Venv {
    Venv::named(here, "tensorboard")
}

/// The command that starts it, if it is installed: in our environment, on PATH, or as a module of
/// the active python.
pub fn find(here: &Surroundings) -> Option<Command> {
    let venv = own_environment(here);
    let as_module = |python: &Path| {
        let mut command = here.command(python);
        command.args(["-m", "tensorboard.main"]);
        command
    };
    if venv.installed::<Vec<String>>().is_some() {
        return Some(as_module(&venv.python()));
    }
    if let Some(program) = here.find("tensorboard") {
        return Some(here.command(program));
    }
    let python = Python::active(here)
        .ok()
        .filter(|python| python.has.tensorboard)?;
    Some(as_module(&python.executable))
}

/// Becomes TensorBoard, which says itself at which address it serves.
pub fn start(here: &Surroundings, logdir: &Path, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let Some(mut command) = find(here) else {
        bail!(
            "TensorBoard is not installed.\n  To mend it: `cargo xtask tensorboard --install` \
             installs it under target/, or install it yourself with `pip install tensorboard`"
        );
    };
    if !logdir.is_dir() {
        say(format_args!(
            "there is no folder {} yet; TensorBoard shows the runs once `cargo xtask train` has made it",
            logdir.display()
        ));
    }
    become_command(command.arg("--logdir").arg(logdir).args(args))
}

/// Installs it into an environment of our own.
pub fn install(here: &Surroundings) -> anyhow::Result<ExitCode> {
    let python = Python::active(here)?;
    python.require_venv(here)?;
    let venv = own_environment(here);
    let lock = venv.lock()?;
    if venv.installed::<Vec<String>>().is_none() {
        venv.create(here, &python, &lock)?;
        let pip = Pip::prepare(here, &venv.python(), &venv.log(), &lock)?;
        let requirements = REQUIREMENTS.map(str::to_owned);
        pip.install(&requirements, &[])?;
        venv.mark_installed(&requirements)?;
    }
    say(format_args!(
        "TensorBoard is installed in {}; `cargo xtask tensorboard` starts it",
        here.shown(&venv.folder())
    ));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    fn program(machine: &Machine) -> Option<std::path::PathBuf> {
        find(&machine.here()).map(|command| command.get_program().into())
    }

    #[test]
    fn the_order_in_which_it_is_looked_for() {
        let machine = Machine::bare();
        assert_eq!(program(&machine), None);
        let answer = r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":true,"torch":null}"#;
        let python = machine.python("bin/python3", answer);
        assert_eq!(program(&machine), Some(python));
        let on_path = machine.script("tensorboard", "");
        assert_eq!(program(&machine), Some(on_path));
        let own = machine.file("target/tensorboard/venv/bin/python", "");
        assert_ne!(
            program(&machine).as_deref(),
            Some(own.as_path()),
            "half an environment"
        );
        own_environment(&machine.here())
            .mark_installed(&REQUIREMENTS)
            .unwrap();
        assert_eq!(program(&machine), Some(own));
    }

    #[test]
    fn without_it_the_message_says_how_to_install_it() {
        let machine = Machine::bare();
        let error = start(&machine.here(), Path::new("runs"), &[]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("cargo xtask tensorboard --install"),
            "{error}"
        );
    }

    #[test]
    fn a_failed_installation_does_not_count() {
        let machine = Machine::bare();
        let answer = r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":null}"#;
        machine.python("bin/python3", answer);
        // The fake `venv` leaves no python behind, so pip cannot even start.
        install(&machine.here()).unwrap_err();
        assert_eq!(program(&machine), None);
    }
}
