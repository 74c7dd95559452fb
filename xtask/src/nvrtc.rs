//! NVRTC, which compiles the CUDA kernels: the one that is there, or else one that is installed.
//!
//! Kernels are compiled without a GPU as well, in the tests, so that this is needed everywhere but
//! on macOS, which has none. Programs are told by a variable where it is.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::libtorch::{SetUpError, gigabytes};
use crate::pip::Pip;
use crate::process::say;
use crate::python::Python;
use crate::surroundings::Surroundings;
use crate::venv::{Venv, VenvError};

/// The variable that flamia-cuda reads: NVRTC's library, or the folder that holds it.
pub const SETTING: &str = "FLAMIA_NVRTC";

/// Of the CUDA that torch's wheels are built for.
const REQUIREMENT: &str = "nvidia-cuda-nvrtc==13.0.88";
/// The oldest major version that flamia-cuda takes.
const OLDEST: u32 = 13;

const DOWNLOAD: u64 = 90_000_000;
const INSTALLED: u64 = 130_000_000;
/// Free bytes that an installation asks for: what is taken out afterwards has to be there first.
pub const SPACE: u64 = DOWNLOAD + INSTALLED + 115_000_000;

/// What the user set, as an absolute path: tests and build scripts run in other folders than ours.
pub fn set(here: &Surroundings) -> Option<PathBuf> {
    let path = here.var(SETTING)?;
    Some(std::path::absolute(path).unwrap_or_else(|_| PathBuf::from(path)))
}

/// Whether what the user set can be NVRTC.
pub fn is_library(path: &Path) -> bool {
    path.is_file() || in_folder(path).is_some()
}

/// The library, if one that serves is there: beside torch, where its wheels put it, in our own
/// environment, in CUDA's toolkit, else by its name alone where the loader finds it.
pub fn find(here: &Surroundings, libtorch: Option<&Path>) -> Option<PathBuf> {
    let of_wheels = libtorch.and_then(Path::parent).and_then(in_packages);
    let of_toolkit = || {
        let set = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(|name| here.var(name));
        let mut folders = set.chain([OsStr::new("/usr/local/cuda")]);
        folders.find_map(|folder| in_folder(&Path::new(folder).join("lib64")))
    };
    let by_the_loader = || {
        let name = format!("libnvrtc.so.{OLDEST}");
        // SAFETY: NVRTC is a compiler library whose initialisers have no preconditions.
        let loads = unsafe { Library::new(&name) }.is_ok();
        loads.then(|| PathBuf::from(name))
    };
    of_wheels
        .or_else(|| installed(here))
        .or_else(of_toolkit)
        .or_else(by_the_loader)
}

/// What programs find in the variable, if it has to be set for them.
pub fn value(here: &Surroundings, libtorch: Option<&Path>) -> Option<PathBuf> {
    set(here).or_else(|| folder(find(here, libtorch)?))
}

/// The same, after an installation if nothing is there. A failure is said and not fatal: all but
/// the kernels works without.
pub fn set_up(here: &Surroundings, libtorch: &Path) -> Option<PathBuf> {
    if let Some(set) = set(here) {
        return Some(set);
    }
    if let Some(library) = find(here, Some(libtorch)) {
        return folder(library);
    }
    if !cfg!(target_os = "linux") {
        return None;
    }
    match install(here) {
        Ok(library) => folder(library),
        Err(error) => {
            say(format_args!(
                "CUDA kernels cannot be compiled without NVRTC: {error}"
            ));
            None
        }
    }
}

/// The loader's needs none.
fn folder(library: PathBuf) -> Option<PathBuf> {
    let folder = library.parent()?;
    (!folder.as_os_str().is_empty()).then(|| folder.to_owned())
}

/// In the lib folders of NVIDIA's wheels, which lie in `nvidia/` of a site-packages folder.
fn in_packages(site: &Path) -> Option<PathBuf> {
    let mut packages = fs::read_dir(site.join("nvidia")).ok()?.flatten();
    packages.find_map(|package| in_folder(&package.path().join("lib")))
}

fn in_folder(folder: &Path) -> Option<PathBuf> {
    let mut files = fs::read_dir(folder).ok()?.flatten().map(|file| file.path());
    files.find(|file| major(file).is_some_and(|major| major >= OLDEST))
}

/// The major version in the library's name, or in that of the file which it is a link to. Neither
/// `libnvrtc-builtins.so.13.0` nor `libnvrtc.alt.so.13` is the library.
fn major(file: &Path) -> Option<u32> {
    let name = file.file_name()?.to_str()?;
    let version = name.strip_prefix("libnvrtc.so")?;
    if version.is_empty() {
        return fs::read_link(file)
            .ok()
            .and_then(|target| major(&file.with_file_name(target)));
    }
    version.strip_prefix('.')?.split('.').next()?.parse().ok()
}

/// Apart from libtorch's environment: a libtorch of the user's own needs it as well.
fn environment(here: &Surroundings) -> Venv {
    Venv::named(here, "nvrtc")
}

fn installed(here: &Surroundings) -> Option<PathBuf> {
    let venv = environment(here);
    let requirement: String = venv.installed()?;
    (requirement == REQUIREMENT)
        .then(|| library(&venv))
        .flatten()
}

fn library(venv: &Venv) -> Option<PathBuf> {
    let mut versions = fs::read_dir(venv.folder().join("lib")).ok()?.flatten();
    versions.find_map(|python| in_packages(&python.path().join("site-packages")))
}

/// Installs it from nothing, unless another process does so first.
fn install(here: &Surroundings) -> Result<PathBuf, SetUpError> {
    let python = Python::active(here)?;
    python.require_venv(here)?;
    let venv = environment(here);
    let lock = venv.lock()?;
    if let Some(by_another) = installed(here) {
        return Ok(by_another);
    }
    say(format_args!(
        "installing NVRTC with pip into {} ({} to download, {} on disk)",
        here.shown(&venv.folder()),
        gigabytes(DOWNLOAD),
        gigabytes(INSTALLED)
    ));
    venv.create(here, &python, &lock)?;
    let pip = Pip::prepare(here, &venv.python(), &venv.log(), &lock)?;
    pip.install(&[REQUIREMENT.to_owned()], &["--no-deps"])?;
    let Some(library) = library(&venv) else {
        return Err(SetUpError::NoNvrtc {
            folder: venv.folder(),
        });
    };
    let lib = library.parent().unwrap_or(&library);
    take_out_alternatives(lib).map_err(|source| VenvError::Io {
        action: "take the second compiler out of",
        path: lib.to_owned(),
        source,
    })?;
    venv.mark_installed(&REQUIREMENT)?;
    Ok(library)
}

/// Half of the wheel is a second build of the compiler, which is only loaded when asked for by
/// name.
fn take_out_alternatives(lib: &Path) -> io::Result<()> {
    for file in fs::read_dir(lib)? {
        let file = file?;
        if file.file_name().to_string_lossy().contains(".alt.so") {
            fs::remove_file(file.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Machine;

    const LIB: &str = "site-packages/nvidia/cu13/lib";

    #[test]
    fn it_is_found_beside_the_wheel() {
        let machine = Machine::bare();
        let torch = machine.wheel("site-packages/torch", "2.11.0");
        machine.file(&format!("{LIB}/libnvrtc-builtins.so.13.0"), "");
        machine.file(&format!("{LIB}/libnvrtc.alt.so.13"), "");
        let library = machine.file(&format!("{LIB}/libnvrtc.so.13"), "");
        assert_eq!(find(&machine.here(), Some(&torch)), Some(library));
        assert_eq!(
            value(&machine.here(), Some(&torch)),
            Some(machine.path(LIB))
        );
    }

    #[test]
    fn one_that_flamia_refuses_is_not_found() {
        let machine = Machine::bare();
        let torch = machine.wheel("site-packages/torch", "2.11.0");
        let old = machine.file("site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "");
        assert_ne!(find(&machine.here(), Some(&torch)), Some(old));
        let names = [
            ("libnvrtc.so.13", Some(13)),
            ("libnvrtc.so.12.8.93", Some(12)),
            ("libnvrtc-builtins.so.13.0", None),
            ("libnvrtc.alt.so.13", None),
            ("libnvrtc.so", None),
        ];
        for (name, version) in names {
            assert_eq!(major(Path::new(name)), version, "{name}");
        }
    }

    #[test]
    fn a_toolkit_is_found_by_what_its_link_names() {
        let machine = Machine::bare();
        machine.file("cuda/lib64/libnvrtc.alt.so.14", "");
        let link = machine.path("cuda/lib64/libnvrtc.so");
        symlink("libnvrtc.so.14", &link).unwrap();
        assert_eq!(major(&link), Some(14));
        let here = machine.here_with(&[("CUDA_HOME", &machine.path("cuda"))]);
        assert_eq!(find(&here, None), Some(link));
    }

    #[test]
    fn what_is_set_wins_and_becomes_absolute() {
        let machine = Machine::bare();
        let torch = machine.wheel("site-packages/torch", "2.11.0");
        machine.file(&format!("{LIB}/libnvrtc.so.13"), "");
        let own = machine.path("own");
        let here = machine.here_with(&[(SETTING, &own)]);
        assert_eq!(value(&here, Some(&torch)), Some(own.clone()));
        assert_eq!(set_up(&here, &torch), Some(own.clone()));
        assert!(!is_library(&own));
        let here = machine.here_with(&[(SETTING, Path::new("nvrtc"))]);
        assert!(value(&here, None).unwrap().is_absolute());
        machine.file("own/libnvrtc.so.13", "");
        assert!(is_library(&own) && is_library(&own.join("libnvrtc.so.13")));
    }

    const PYTHON: &str = r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":null}"#;

    /// A machine whose python3 makes environments that hold these files, and a pip that writes
    /// down what it was asked, and may fail.
    fn machine_with_pip(files: &[&str], fails: &str) -> Machine {
        let machine = Machine::bare();
        for file in files {
            machine.file(&format!("prepared/lib/python3.12/{LIB}/{file}"), "");
        }
        machine.script_at(
            "prepared/bin/python",
            &format!(
                "echo \"$@\" >> {}; case \"$*\" in *nvrtc*) {fails};; esac",
                machine.path("asked").display()
            ),
        );
        machine.script(
            "python3",
            &format!(
                "case \"$*\" in\n\"-m venv \"*) /bin/cp -R {} \"$3\";;\n*) echo '{PYTHON}';;\nesac",
                machine.path("prepared").display()
            ),
        );
        machine
    }

    const WHEEL: [&str; 4] = [
        "libnvrtc.so.13",
        "libnvrtc-builtins.so.13.0",
        "libnvrtc.alt.so.13",
        "libnvrtc-builtins.alt.so.13.0",
    ];

    #[test]
    fn the_wheel_is_installed_once_without_its_second_compiler() {
        let machine = machine_with_pip(&WHEEL, ":");
        let library = install(&machine.here()).unwrap();
        assert!(
            library.ends_with(format!("{LIB}/libnvrtc.so.13")),
            "{library:?}"
        );
        let files = fs::read_dir(library.parent().unwrap()).unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]);
        let asked = fs::read_to_string(machine.path("asked")).unwrap();
        assert!(
            asked.contains(&format!("--no-deps {REQUIREMENT}")),
            "{asked}"
        );

        fs::remove_file(machine.path("asked")).unwrap();
        assert_eq!(install(&machine.here()).unwrap(), library);
        let torch = machine.wheel("cpu/torch", "2.11.0+cpu");
        assert_eq!(find(&machine.here(), Some(&torch)), Some(library));
        assert!(!machine.path("asked").exists());
    }

    #[test]
    fn another_version_is_installed_anew() {
        let machine = machine_with_pip(&WHEEL, ":");
        install(&machine.here()).unwrap();
        environment(&machine.here())
            .mark_installed(&"nvidia-cuda-nvrtc==13.0.1")
            .unwrap();
        assert_eq!(installed(&machine.here()), None);
        install(&machine.here()).unwrap();
        assert!(installed(&machine.here()).is_some());
    }

    #[test]
    fn a_failed_installation_leaves_nothing_that_is_taken_as_whole() {
        for (files, fails) in [(&WHEEL[..], "exit 1"), (&[][..], ":")] {
            let machine = machine_with_pip(files, fails);
            install(&machine.here()).unwrap_err();
            assert!(machine.path("target/nvrtc/venv/bin/python").exists());
            assert_eq!(installed(&machine.here()), None);
        }
    }
}
