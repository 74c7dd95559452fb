//! The python that has transformers, against which exported models are held.

use std::path::PathBuf;

use crate::libtorch::{SetUpError, WANTED, gigabytes};
use crate::pip::Pip;
use crate::process::say;
use crate::python::Python;
use crate::surroundings::Surroundings;
use crate::venv::Venv;

/// The variable that tells the test about it.
pub const SETTING: &str = "TRANSFORMERS_PYTHON";

/// The major version that the test was written against.
const TRANSFORMERS: &str = "transformers>=5.0,<6";

const DOWNLOAD: u64 = 2_900_000_000;
const INSTALLED: u64 = 5_000_000_000;

/// The user's, or else one in an environment of our own, with a torch of its own: the libtorch that
/// was installed for a CPU is no torch that python can import.
pub fn set_up(here: &Surroundings) -> Result<PathBuf, SetUpError> {
    if let Some(set) = here.var(SETTING) {
        return Ok(set.into());
    }
    let venv = Venv::named(here, "transformers");
    let requirements = [format!("torch=={WANTED}"), TRANSFORMERS.to_owned()];
    let is_there = || venv.installed::<Vec<String>>().as_deref() == Some(&requirements[..]);
    if is_there() {
        return Ok(venv.python());
    }
    let python = Python::active(here)?;
    python.require_venv(here)?;
    let lock = venv.lock()?;
    if !is_there() {
        say(format_args!(
            "installing transformers with pip into {} (with torch: {} to download, {} on disk)",
            here.shown(&venv.folder()),
            gigabytes(DOWNLOAD),
            gigabytes(INSTALLED)
        ));
        venv.create(here, &python, &lock)?;
        let pip = Pip::prepare(here, &venv.python(), &venv.log(), &lock)?;
        pip.install(&requirements, &[])?;
        venv.mark_installed(&requirements)?;
    }
    Ok(venv.python())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::Machine;

    #[test]
    fn the_users_comes_before_one_of_our_own() {
        let machine = Machine::bare();
        assert!(
            set_up(&machine.here()).is_err(),
            "no python, no transformers"
        );
        let own = machine.file("target/transformers/venv/bin/python", "");
        let venv = Venv::named(&machine.here(), "transformers");
        venv.mark_installed(&["torch==1.0", TRANSFORMERS]).unwrap();
        assert!(set_up(&machine.here()).is_err(), "another torch's");
        venv.mark_installed(&[&format!("torch=={WANTED}"), TRANSFORMERS])
            .unwrap();
        assert_eq!(set_up(&machine.here()).unwrap(), own);
        let here = machine.here_with(&[(SETTING, Path::new("/theirs"))]);
        assert_eq!(set_up(&here).unwrap(), Path::new("/theirs"));
    }
}
