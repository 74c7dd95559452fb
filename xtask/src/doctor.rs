//! What this machine has of what the project needs, and the commands that mend the rest.

use std::process::ExitCode;

use serde::Serialize;

use crate::compiler;
use crate::cuda::Driver;
use crate::libtorch::{self, CXX11_ABI, Found, Kind, Libtorch, SetUpError, Source, gigabytes};
use crate::nvrtc;
use crate::python::{Python, PythonError};
use crate::surroundings::Surroundings;
use crate::tensorboard;

/// Free bytes that the build itself takes, with all of its dependencies.
const BUILD_SPACE: u64 = 3_000_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// Not there, and nothing fails for it.
    Optional,
    /// Not there, and needed.
    Missing,
}

/// One thing that was looked for.
#[derive(Debug, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub state: State,
    pub found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        let (found, remedy) = (found.into(), None);
        Self {
            name,
            state: State::Ok,
            found,
            remedy,
        }
    }

    fn optional(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (found, remedy) = (found.into(), Some(remedy.into()));
        Self {
            name,
            state: State::Optional,
            found,
            remedy,
        }
    }

    /// The remedy is what the error itself says after its first line.
    fn missing(name: &'static str, error: &dyn std::error::Error) -> Self {
        let message = error.to_string();
        let (found, remedy) = match message.split_once("\n  To mend it: ") {
            Some((found, remedy)) => (found.to_owned(), Some(remedy.to_owned())),
            None => (message, None),
        };
        Self {
            name,
            state: State::Missing,
            found,
            remedy,
        }
    }
}

/// Prints what was found; fails if something needed is missing.
pub fn run(here: &Surroundings, json: bool) -> anyhow::Result<ExitCode> {
    let findings = examine(here, &Driver::probe());
    if json {
        println!("{}", serde_json::to_string_pretty(&findings)?);
    } else {
        print!("{}", table(&findings));
    }
    let healthy = findings
        .iter()
        .all(|finding| finding.state != State::Missing);
    Ok(if healthy {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Looks at everything, changes nothing, and asks nothing of the network.
pub fn examine(here: &Surroundings, driver: &Driver) -> Vec<Finding> {
    let python = Python::active(here);
    let found = libtorch::find(here);
    let libtorch = found
        .as_ref()
        .ok()
        .and_then(|found| found.libtorch.as_ref());
    let mut findings = vec![
        tool(here, "rustc"),
        tool(here, "cargo"),
        cxx(here),
        python_finding(here, &python, libtorch.is_some()),
    ];
    findings.extend(libtorch_findings(&found, driver, python.is_ok()));
    findings.push(driver_finding(driver));
    let nvrtc = nvrtc_finding(here, libtorch);
    let has_nvrtc = nvrtc.state == State::Ok;
    findings.push(nvrtc);
    findings.push(tensorboard_finding(here));
    findings.push(space(here, libtorch.is_none(), !has_nvrtc, driver));
    findings
}

fn tool(here: &Surroundings, name: &'static str) -> Finding {
    let answer = here
        .find(name)
        .and_then(|path| here.command(path).arg("--version").output().ok());
    match answer {
        Some(output) if output.status.success() => {
            Finding::ok(name, String::from_utf8_lossy(&output.stdout).trim())
        }
        _ => Finding {
            name,
            state: State::Missing,
            found: "not on PATH".to_owned(),
            remedy: Some("install Rust from https://rustup.rs".to_owned()),
        },
    }
}

fn cxx(here: &Surroundings) -> Finding {
    match compiler::find(here) {
        Ok(compiler) => Finding::ok(
            "C++ compiler",
            format!("{} ({})", compiler.version, compiler.command),
        ),
        Err(error) => Finding::missing("C++ compiler", &error),
    }
}

/// Python is only needed to install libtorch.
fn python_finding(
    here: &Surroundings,
    python: &Result<Python, PythonError>,
    has_libtorch: bool,
) -> Finding {
    let fault = match python {
        Ok(python) => match python.require_venv(here) {
            Ok(()) => {
                let pip = if python.has.pip {
                    "venv, ensurepip and pip"
                } else {
                    "venv and ensurepip"
                };
                let found = format!(
                    "{} with {pip} ({})",
                    python.has.version,
                    python.executable.display()
                );
                return Finding::ok("python3", found);
            }
            Err(error) => Finding::missing("python3", &error),
        },
        Err(error) => Finding::missing("python3", error),
    };
    if has_libtorch {
        let state = State::Optional;
        return Finding { state, ..fault };
    }
    fault
}

fn libtorch_findings(
    found: &Result<Found, libtorch::FolderError>,
    driver: &Driver,
    has_python: bool,
) -> Vec<Finding> {
    let name = "libtorch";
    let found = match found {
        Ok(found) => found,
        Err(error) => return vec![Finding::missing(name, error)],
    };
    let skipped = found.skipped.iter().map(|skipped| {
        let remedy = format!(
            "nothing to do; `pip install torch=={}` there would let it be used",
            libtorch::WANTED
        );
        Finding::optional(name, skipped.to_string(), remedy)
    });
    let main = match &found.libtorch {
        Some(libtorch) => {
            let found = format!(
                "{}, cxx11 ABI {CXX11_ABI} ({})",
                libtorch.described(),
                libtorch.folder.display()
            );
            if libtorch.has_cuda() || !driver.has_gpu() {
                Finding::ok(name, found)
            } else {
                let remedy = match libtorch.source {
                    Source::OwnEnvironment(_) => "`cargo xtask train` installs one with CUDA",
                    _ => "a GPU is here and goes unused: install a torch with CUDA there",
                };
                Finding::optional(name, found, remedy)
            }
        }
        None if has_python => Finding::optional(
            name,
            "not installed yet",
            "`cargo xtask train` installs it under target/",
        ),
        None => Finding {
            name,
            state: State::Missing,
            found: "not found, and without python3 it cannot be installed".to_owned(),
            remedy: Some(format!(
                "install python3 as said above, or set LIBTORCH to a libtorch {}",
                libtorch::WANTED
            )),
        },
    };
    skipped.chain([main]).collect()
}

/// The CUDA that the torch wheels of this version are built for.
const WHEEL_CUDA: (i32, i32) = (13, 0);

fn driver_finding(driver: &Driver) -> Finding {
    let name = "NVIDIA GPU";
    match driver {
        Driver::Absent => Finding::optional(
            name,
            "no driver (libcuda.so.1 does not load)",
            "nothing to do on a machine without an NVIDIA GPU; all runs on the CPU",
        ),
        Driver::Unusable { code } => Finding::optional(
            name,
            format!("libcuda.so.1 loads and fails with CUDA error {code}"),
            "see what `nvidia-smi` says; after a driver update the machine must be restarted",
        ),
        Driver::Present {
            cuda: (major, minor),
            gpus,
        } if gpus.is_empty() => Finding::optional(
            name,
            format!("a driver for CUDA {major}.{minor}, and no GPU visible"),
            "if there is one: unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (`--gpus all`)",
        ),
        Driver::Present { cuda, gpus } => {
            let names = gpus.iter().map(|gpu| {
                let (major, minor) = gpu.compute_capability;
                format!("{} (sm_{major}{minor})", gpu.name)
            });
            let names = names.collect::<Vec<_>>().join(", ");
            let found = format!("{names}, driver for CUDA {}.{}", cuda.0, cuda.1);
            if *cuda < WHEEL_CUDA {
                let (major, minor) = WHEEL_CUDA;
                let remedy = format!(
                    "torch's wheels are for CUDA {major}.{minor}: update the driver, or set LIBTORCH to a torch for your CUDA"
                );
                return Finding::optional(name, found, remedy);
            }
            Finding::ok(name, found)
        }
    }
}

fn nvrtc_finding(here: &Surroundings, libtorch: Option<&Libtorch>) -> Finding {
    let name = "NVRTC";
    if let Some(set) = nvrtc::set(here) {
        let found = format!("{} is {}", nvrtc::SETTING, set.display());
        if nvrtc::is_library(&set) {
            return Finding::ok(name, found);
        }
        return Finding {
            name,
            state: State::Missing,
            found: format!("{found}, and there is no libnvrtc.so.13"),
            remedy: Some("unset it, and NVRTC is found or installed for you".to_owned()),
        };
    }
    match nvrtc::find(here, libtorch.map(|libtorch| libtorch.folder.as_path())) {
        Some(path) => Finding::ok(name, path.display().to_string()),
        None if cfg!(target_os = "linux") => Finding::optional(
            name,
            "NVRTC 13 or newer, which compiles the CUDA kernels, is not installed yet",
            "`cargo xtask test` or `train` installs it under target/",
        ),
        None => Finding::optional(
            name,
            "there is none for this system",
            "nothing to do: it is only used for NVIDIA GPUs",
        ),
    }
}

fn tensorboard_finding(here: &Surroundings) -> Finding {
    let name = "TensorBoard";
    match tensorboard::find(here) {
        Some(command) => Finding::ok(name, command.get_program().to_string_lossy()),
        None => Finding::optional(name, "not installed", "cargo xtask tensorboard --install"),
    }
}

fn space(
    here: &Surroundings,
    installs_libtorch: bool,
    installs_nvrtc: bool,
    driver: &Driver,
) -> Finding {
    let name = "disk space";
    let kind = Kind::for_driver(driver);
    let mut install = 0;
    if installs_libtorch {
        install += libtorch::space_needed(kind);
    }
    // With CUDA, NVRTC is a part of the other.
    if installs_nvrtc && !(installs_libtorch && kind == Kind::Full) {
        install += nvrtc::SPACE;
    }
    let needed = BUILD_SPACE + install;
    let Some((folder, free)) = libtorch::free_space(&here.target) else {
        let remedy = format!("see with `df` that {} are free", gigabytes(needed));
        return Finding::optional(name, "could not be asked", remedy);
    };
    if free < install {
        let error = SetUpError::Space {
            folder,
            needed: install,
            free,
        };
        return Finding::missing(name, &error);
    }
    let found = format!("{} free at {}", gigabytes(free), folder.display());
    if free < needed {
        let remedy = format!(
            "a first build takes up to {}: free some space",
            gigabytes(needed)
        );
        return Finding::optional(name, found, remedy);
    }
    Finding::ok(name, found)
}

fn table(findings: &[Finding]) -> String {
    let width = findings
        .iter()
        .map(|finding| finding.name.len())
        .max()
        .unwrap_or(0);
    let mut lines = String::new();
    for Finding {
        name,
        state,
        found,
        remedy,
    } in findings
    {
        let mark = match state {
            State::Ok => "ok",
            State::Optional => "-",
            State::Missing => "MISSING",
        };
        // What a compiler says may be many lines.
        let indent = format!("\n{:1$}", "", width + 11);
        let found = found.replace('\n', &indent);
        lines += &format!("{mark:7}  {name:width$}  {found}\n");
        if let Some(remedy) = remedy {
            lines += &format!(
                "{:9}{:width$}  -> {}\n",
                "",
                "",
                remedy.replace("\n", &indent)
            );
        }
    }
    let missing = findings
        .iter()
        .filter(|finding| finding.state == State::Missing)
        .count();
    lines += &match missing {
        0 => "Nothing that is needed is missing.\n".to_owned(),
        1 => "One thing that is needed is missing.\n".to_owned(),
        _ => format!("{missing} things that are needed are missing.\n"),
    };
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Gpu;
    use crate::testing::Machine;

    fn state(findings: &[Finding], name: &str) -> State {
        findings
            .iter()
            .rfind(|finding| finding.name == name)
            .unwrap()
            .state
    }

    #[test]
    fn on_an_empty_machine_each_missing_thing_has_its_remedy() {
        let machine = Machine::bare();
        let findings = examine(&machine.here(), &Driver::Absent);
        for name in ["rustc", "cargo", "C++ compiler", "python3", "libtorch"] {
            assert_eq!(state(&findings, name), State::Missing, "{name}");
        }
        for name in ["NVIDIA GPU", "TensorBoard"] {
            assert_eq!(state(&findings, name), State::Optional, "{name}");
        }
        for finding in findings.iter().filter(|finding| finding.state != State::Ok) {
            assert!(finding.remedy.is_some(), "{}", finding.name);
        }
        assert_eq!(run(&machine.here(), true).unwrap(), ExitCode::FAILURE);
        assert!(table(&findings).ends_with("5 things that are needed are missing.\n"));
    }

    #[test]
    fn a_machine_with_the_basics_is_healthy_before_libtorch_is_installed() {
        let machine = Machine::bare();
        for tool in ["rustc", "cargo", "c++"] {
            machine.script(tool, &format!("echo '{tool} 1.2.3'"));
        }
        machine.python("bin/python3", r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":null}"#);
        let findings = examine(&machine.here(), &Driver::Absent);
        assert!(
            findings
                .iter()
                .all(|finding| finding.state != State::Missing),
            "{findings:?}"
        );
        assert_eq!(state(&findings, "libtorch"), State::Optional);
        let shown = table(&findings);
        assert!(shown.contains("rustc 1.2.3"), "{shown}");
        assert!(
            shown.contains("-> `cargo xtask train` installs it"),
            "{shown}"
        );
    }

    #[test]
    fn python_is_not_needed_where_libtorch_is_there() {
        let machine = Machine::bare();
        let torch = machine.wheel("torch", "2.11.0+cpu");
        let findings = examine(&machine.here_with(&[("LIBTORCH", &torch)]), &Driver::Absent);
        assert_eq!(state(&findings, "libtorch"), State::Ok);
        assert_eq!(state(&findings, "python3"), State::Optional);
        let libtorch = findings
            .iter()
            .find(|finding| finding.name == "libtorch")
            .unwrap();
        let said = "2.11.0+cpu from LIBTORCH, without CUDA, cxx11 ABI 1";
        assert!(libtorch.found.starts_with(said), "{libtorch:?}");
    }

    #[test]
    fn a_wrong_libtorch_is_missing_with_the_remedy_apart() {
        let machine = Machine::bare();
        let torch = machine.wheel("torch", "2.12.0");
        let findings = examine(&machine.here_with(&[("LIBTORCH", &torch)]), &Driver::Absent);
        let finding = findings
            .iter()
            .find(|finding| finding.name == "libtorch")
            .unwrap();
        assert_eq!(finding.state, State::Missing);
        assert!(finding.found.contains("2.12.0"), "{finding:?}");
        assert!(
            finding
                .remedy
                .as_ref()
                .unwrap()
                .starts_with("unset LIBTORCH"),
            "{finding:?}"
        );
    }

    #[test]
    fn gpus_are_named_and_an_old_driver_is_told() {
        let driver = |cuda| Driver::Present {
            cuda,
            gpus: vec![Gpu {
                name: "NVIDIA H200".to_owned(),
                compute_capability: (9, 0),
            }],
        };
        let recent = driver_finding(&driver((13, 1)));
        assert_eq!(recent.state, State::Ok);
        assert_eq!(recent.found, "NVIDIA H200 (sm_90), driver for CUDA 13.1");
        let old = driver_finding(&driver((12, 8)));
        assert_eq!(old.state, State::Optional);
        assert!(old.remedy.unwrap().contains("update the driver"));
    }

    #[test]
    fn nvrtc_is_found_as_programs_find_it() {
        let machine = Machine::bare();
        let torch = machine.wheel("site-packages/torch", "2.11.0+cu130");
        let finding = |vars: &[(&str, &std::path::Path)]| {
            let findings = examine(&machine.here_with(vars), &Driver::Absent);
            findings
                .into_iter()
                .find(|finding| finding.name == "NVRTC")
                .unwrap()
        };
        let library = machine.file("site-packages/nvidia/cu13/lib/libnvrtc.so.13", "");
        let beside = finding(&[("LIBTORCH", &torch)]);
        assert_eq!(
            (beside.state, beside.found),
            (State::Ok, library.display().to_string())
        );
        let bad = finding(&[
            ("LIBTORCH", &torch),
            (nvrtc::SETTING, &machine.path("none")),
        ]);
        assert_eq!(bad.state, State::Missing);
        assert!(
            bad.found.contains("FLAMIA_NVRTC is") && bad.found.contains("none"),
            "{bad:?}"
        );
        let set = finding(&[(nvrtc::SETTING, library.parent().unwrap())]);
        assert_eq!(set.state, State::Ok);
    }

    #[test]
    fn the_json_is_a_list_of_findings() {
        let machine = Machine::bare();
        let json = serde_json::to_value(examine(&machine.here(), &Driver::Absent)).unwrap();
        assert_eq!(json[0]["name"], "rustc");
        assert_eq!(json[0]["state"], "missing");
        assert!(json[0]["remedy"].is_string());
    }
}
