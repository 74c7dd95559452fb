//! Installing torch with pip into an environment of our own.
//!
//! Two kinds, each in its own folder. With a GPU it is all that torch asks for. Without one it is
//! torch's wheel and, of the 2 GB of CUDA libraries its metadata names, the two that `libtorch_cpu`
//! itself is linked with: the runtime and CUPTI (13 MB). torch's own CUDA libraries, which came
//! with the wheel, are then taken out (500 MB): torch-sys passes `-ltorch_cuda` when that library
//! lies there, and `libtorch.so`, which holds nothing itself, depends on it. LLD leaves both out of
//! the binary; GNU ld reports what is undefined in the first, and keeps the second, so that the
//! binary would not start. So in their place `libtorch.so` is a link to `libtorch_cpu.so`.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::source::{examine, library};
use super::{Libtorch, SetUpError, Source, WANTED, gigabytes};
use crate::cuda::Driver;
use crate::pip::Pip;
use crate::process::{say, spoken};
use crate::python::Python;
use crate::surroundings::Surroundings;
use crate::venv::{Venv, VenvError};

/// How much of what torch asks for is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// What runs on a CPU.
    Cpu,
    /// Everything, CUDA libraries included.
    Full,
}

impl Kind {
    pub fn for_driver(driver: &Driver) -> Self {
        if driver.has_gpu() {
            Self::Full
        } else {
            Self::Cpu
        }
    }

    fn environment(self, here: &Surroundings) -> Venv {
        let name = match self {
            Self::Cpu => "libtorch-cpu",
            Self::Full => "libtorch",
        };
        Venv::named(here, name)
    }

    /// Bytes that pip downloads, for Linux on x86-64, where they are most.
    fn download(self) -> u64 {
        match self {
            Self::Cpu => 550_000_000,
            Self::Full => 2_800_000_000,
        }
    }

    fn installed(self) -> u64 {
        match self {
            Self::Cpu => 760_000_000,
            Self::Full => 4_900_000_000,
        }
    }
}

/// Free bytes that an installation asks for: pip unpacks beside the downloaded files, and what is
/// taken out afterwards has to be there first.
pub fn space_needed(kind: Kind) -> u64 {
    const TAKEN_OUT: u64 = 500_000_000;
    kind.download() + kind.installed() + TAKEN_OUT
}

/// The environment's marker.
#[derive(Serialize, Deserialize)]
pub struct Installed {
    /// Torch's folder, relative to the environment's.
    pub torch: PathBuf,
}

/// What was installed under `target/`, if the installation was completed and is still there. One
/// with CUDA serves on the CPU as well, and so comes first.
pub fn of_own_environment(here: &Surroundings) -> Option<Libtorch> {
    [Kind::Full, Kind::Cpu]
        .into_iter()
        .find_map(|kind| installed(here, kind))
}

fn installed(here: &Surroundings, kind: Kind) -> Option<Libtorch> {
    let venv = kind.environment(here);
    let Installed { torch } = venv.installed()?;
    let folder = venv.folder().join(torch);
    Some(Libtorch {
        version: examine(&folder).ok()?,
        folder,
        source: Source::OwnEnvironment(kind),
    })
}

/// Installs torch from nothing, unless another process does so first.
pub fn install(here: &Surroundings, kind: Kind) -> Result<Libtorch, SetUpError> {
    let python = Python::active(here)?;
    python.require_venv(here)?;
    let venv = kind.environment(here);
    let lock = venv.lock()?;
    if let Some(by_another) = installed(here, kind) {
        return Ok(by_another);
    }
    require_space(here, kind)?;

    let start = Instant::now();
    say(format_args!(
        "installing torch {WANTED} with pip into {} ({}: {} to download, {} on disk)",
        here.shown(&venv.folder()),
        match kind {
            Kind::Cpu => "for the CPU, since there is no NVIDIA GPU",
            Kind::Full => "with CUDA",
        },
        gigabytes(kind.download()),
        gigabytes(kind.installed()),
    ));
    venv.create(here, &python, &lock)?;
    let pip = Pip::prepare(here, &venv.python(), &venv.log(), &lock)?;
    let libtorch = match complete(here, &venv, &pip, kind) {
        Err(SetUpError::DoesNotLoad { output, .. }) if kind == Kind::Cpu => {
            say(format_args!(
                "without CUDA it does not load here ({output})"
            ));
            return install(here, Kind::Full);
        }
        completed => completed?,
    };
    say(format_args!(
        "libtorch installed in {}",
        spoken(start.elapsed())
    ));
    Ok(libtorch)
}

/// Installs torch with CUDA where a GPU has appeared since our environment was made. A failure is
/// said and not fatal: what is there still serves on the CPU.
pub fn upgrade_for(here: &Surroundings, driver: &Driver, found: Libtorch) -> Libtorch {
    if found.source != Source::OwnEnvironment(Kind::Cpu) || !driver.has_gpu() {
        return found;
    }
    say("a GPU is here, and our libtorch is without CUDA");
    install(here, Kind::Full).unwrap_or_else(|error| {
        say(format_args!(
            "libtorch stays as it is, and all runs on the CPU: {error}"
        ));
        found
    })
}

fn require_space(here: &Surroundings, kind: Kind) -> Result<(), SetUpError> {
    match free_space(&here.target) {
        Some((folder, free)) if free < space_needed(kind) => Err(SetUpError::Space {
            folder,
            needed: space_needed(kind),
            free,
        }),
        _ => Ok(()),
    }
}

/// Free bytes where the folder is or will be, with the existing folder that was asked about.
pub fn free_space(folder: &Path) -> Option<(PathBuf, u64)> {
    let existing = folder.ancestors().find(|folder| folder.exists())?;
    let disk = rustix::fs::statvfs(existing).ok()?;
    Some((existing.to_owned(), disk.f_bavail * disk.f_frsize))
}

/// Has pip install what the kind asks for, sees it load, and marks the environment.
fn complete(
    here: &Surroundings,
    venv: &Venv,
    pip: &Pip,
    kind: Kind,
) -> Result<Libtorch, SetUpError> {
    let torch = format!("torch=={WANTED}");
    let options: &[&str] = match kind {
        Kind::Cpu => &["--no-deps"],
        Kind::Full => &[],
    };
    pip.install(&[torch], options)?;
    let folder = folder_of_torch(here, venv)?;
    if kind == Kind::Cpu {
        let requirements = cpu_requirements(&metadata(&folder));
        if !requirements.is_empty() {
            pip.install(&requirements, &[])?;
        }
        let lib = folder.join("lib");
        take_out_cuda(&lib).map_err(|source| VenvError::Io {
            action: "take CUDA's libraries out of",
            path: lib,
            source,
        })?;
    }
    load(here, venv, &folder)?;
    let relative = folder.strip_prefix(venv.folder()).unwrap_or(&folder);
    venv.mark_installed(&Installed {
        torch: relative.to_owned(),
    })?;
    installed(here, kind).ok_or_else(|| SetUpError::DoesNotLoad {
        output: format!("{} is not a torch {WANTED}", folder.display()),
        folder: venv.folder(),
    })
}

/// Removes what cannot be loaded without the CUDA libraries that were not installed. A wheel
/// that is built for the CPU alone has none of it.
fn take_out_cuda(lib: &Path) -> io::Result<()> {
    const OF_CUDA: [&str; 4] = ["torch_cuda", "c10_cuda", "caffe2_nvrtc", "torch_nvshmem"];
    let umbrella = lib.join(library("torch"));
    if !lib.join(library("torch_cuda")).exists() {
        return Ok(());
    }
    for file in fs::read_dir(lib)? {
        let file = file?;
        let name = file.file_name().to_string_lossy().into_owned();
        let of_cuda = |name: &str| OF_CUDA.iter().any(|library| name.starts_with(library));
        if name.strip_prefix("lib").is_some_and(of_cuda) {
            fs::remove_file(file.path())?;
        }
    }
    fs::remove_file(&umbrella)?;
    symlink(library("torch_cpu"), &umbrella)
}

fn folder_of_torch(here: &Surroundings, venv: &Venv) -> Result<PathBuf, SetUpError> {
    let python = Python::at(here, venv.python())?;
    python.has.torch.ok_or_else(|| SetUpError::DoesNotLoad {
        folder: venv.folder(),
        output: "pip reported success, and there is no torch".to_owned(),
    })
}

/// Torch's METADATA, which lies beside its folder; empty where it cannot be read.
fn metadata(torch: &Path) -> String {
    let packages = torch.parent().and_then(|site| fs::read_dir(site).ok());
    let info = packages.into_iter().flatten().flatten().find(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("torch-") && name.ends_with(".dist-info")
    });
    let text = info.and_then(|info| fs::read_to_string(info.path().join("METADATA")).ok());
    text.unwrap_or_default()
}

/// What `libtorch_cpu` is linked with, pinned as torch's own metadata pins it: the CUDA runtime
/// and CUPTI, either as packages of their own or as extras of `cuda-toolkit`. Environment markers
/// are kept, so that pip leaves out what is not for this system.
fn cpu_requirements(metadata: &str) -> Vec<String> {
    const PACKAGES: [&str; 2] = ["nvidia-cuda-runtime", "nvidia-cuda-cupti"];
    const EXTRAS: [&str; 2] = ["cudart", "cupti"];
    let requirements = metadata
        .lines()
        .filter_map(|line| line.strip_prefix("Requires-Dist: "));
    let of_cpu = requirements.filter_map(|requirement| {
        if PACKAGES
            .iter()
            .any(|package| requirement.starts_with(package))
        {
            return Some(requirement.to_owned());
        }
        let (extras, pin) = requirement.strip_prefix("cuda-toolkit[")?.split_once(']')?;
        let extras = extras
            .split(',')
            .map(str::trim)
            .filter(|extra| EXTRAS.contains(extra));
        let extras = extras.collect::<Vec<_>>().join(",");
        (!extras.is_empty()).then(|| format!("cuda-toolkit[{extras}]{pin}"))
    });
    of_cpu.collect()
}

/// Loads the library as a program would, without the Python part of torch.
fn load(here: &Surroundings, venv: &Venv, torch: &Path) -> Result<(), SetUpError> {
    let output = here
        .command(venv.python())
        .args(["-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])"])
        .arg(torch.join("lib").join(library("torch")))
        .output();
    let reason = match output {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr)
            .lines()
            .last()
            .map(str::to_owned),
        Err(error) => Some(error.to_string()),
    };
    Err(SetUpError::DoesNotLoad {
        folder: venv.folder(),
        output: reason.unwrap_or_else(|| "no reason given".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Gpu;
    use crate::testing::Machine;

    const METADATA: &str = r#"Metadata-Version: 2.4
Name: torch
Requires-Dist: filelock
Requires-Dist: cuda-toolkit[cublas,cudart,cufft,cupti,nvrtc,nvtx]==13.0.2; platform_system == "Linux"
Requires-Dist: nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"

cuda-toolkit[cudart] in the description
"#;

    #[test]
    fn the_cpu_needs_two_of_the_cuda_libraries_as_torch_pins_them() {
        let wanted = r#"cuda-toolkit[cudart,cupti]==13.0.2; platform_system == "Linux""#;
        assert_eq!(cpu_requirements(METADATA), [wanted]);
        let older = "Requires-Dist: nvidia-cuda-nvrtc-cu12==12.8.93; platform_system == \"Linux\"\n\
            Requires-Dist: nvidia-cuda-runtime-cu12==12.8.90; platform_system == \"Linux\"\n\
            Requires-Dist: nvidia-cuda-cupti-cu12==12.8.90; platform_system == \"Linux\"\n";
        let names: Vec<_> = cpu_requirements(older)
            .iter()
            .map(|line| line.split("==").next().unwrap().to_owned())
            .collect();
        assert_eq!(
            names,
            ["nvidia-cuda-runtime-cu12", "nvidia-cuda-cupti-cu12"]
        );
        assert!(cpu_requirements("Requires-Dist: filelock\n").is_empty());
    }

    const WITHOUT_TORCH: &str = r#"{"version":"3.12.1","venv":true,"ensurepip":true,"pip":true,"tensorboard":false,"torch":null}"#;

    /// A machine whose python3 makes environments, of both kinds, out of what is prepared here:
    /// torch, and a python that plays pip (and `torch_fails`) and loads libtorch (and `loads`
    /// says how). It needs real tools to do so.
    fn machine_with_pip(torch_fails: &str, loads: &str) -> Machine {
        let machine = Machine::bare();
        let lib = "prepared/lib/python3.12/site-packages/torch/lib";
        machine.wheel(
            "prepared/lib/python3.12/site-packages/torch",
            "2.11.0+cu130",
        );
        for name in [
            "torch",
            "torch_cuda",
            "torch_cuda_linalg",
            "c10_cuda",
            "c10",
        ] {
            machine.file(&format!("{lib}/{}", library(name)), "");
        }
        machine.file(
            "prepared/lib/python3.12/site-packages/torch-2.11.0.dist-info/METADATA",
            METADATA,
        );
        machine.script_at(
            "prepared/bin/python",
            &format!(
                r#"site="${{0%/bin/python}}/lib/python3.12/site-packages"
case "$*" in
"-m pip "*) echo "$@" >> {asked}; case "$*" in *torch==*) {torch_fails};; esac;;
*ctypes.CDLL*) {loads};;
*) echo '{without}'"\"$site/torch\"}}";;
esac"#,
                asked = machine.path("asked").display(),
                without = WITHOUT_TORCH.trim_end_matches("null}"),
            ),
        );
        machine.script(
            "python3",
            &format!(
                r#"case "$*" in
"-m venv "*) /bin/cp -R {prepared} "$3";;
*) echo '{WITHOUT_TORCH}';;
esac"#,
                prepared = machine.path("prepared").display()
            ),
        );
        machine
    }

    /// What pip was asked for torch, from the first line to the last.
    fn asked(machine: &Machine) -> Vec<String> {
        let asked = fs::read_to_string(machine.path("asked")).unwrap();
        let options = asked
            .lines()
            .map(|line| line.rsplit("--progress-bar ").next().unwrap());
        options
            .filter(|line| line.starts_with("raw "))
            .map(str::to_owned)
            .collect()
    }

    fn libraries(libtorch: &Libtorch) -> Vec<String> {
        let files = fs::read_dir(libtorch.folder.join("lib")).unwrap();
        let mut names: Vec<_> = files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn on_a_cpu_torch_comes_without_its_dependencies_and_then_the_two() {
        let machine = machine_with_pip(":", ":");
        let libtorch = install(&machine.here(), Kind::Cpu).unwrap();
        assert_eq!(libtorch.source, Source::OwnEnvironment(Kind::Cpu));
        assert_eq!(libtorch.version, "2.11.0+cu130");
        assert_eq!(
            asked(&machine),
            [
                "raw --no-deps torch==2.11.0",
                r#"raw cuda-toolkit[cudart,cupti]==13.0.2; platform_system == "Linux""#,
            ]
        );
        assert_eq!(
            libraries(&libtorch),
            ["c10", "torch", "torch_cpu"].map(library)
        );
        let umbrella = fs::read_link(libtorch.folder.join("lib").join(library("torch"))).unwrap();
        assert_eq!(umbrella, Path::new(&library("torch_cpu")));
        assert_eq!(of_own_environment(&machine.here()), Some(libtorch));
    }

    #[test]
    fn with_a_gpu_everything_is_installed_and_kept() {
        let machine = machine_with_pip(":", ":");
        let libtorch = install(&machine.here(), Kind::Full).unwrap();
        assert_eq!(asked(&machine), ["raw torch==2.11.0"]);
        assert!(libraries(&libtorch).contains(&library("torch_cuda")));
    }

    #[test]
    fn a_second_installation_asks_pip_nothing() {
        let machine = machine_with_pip(":", ":");
        let first = install(&machine.here(), Kind::Cpu).unwrap();
        fs::remove_file(machine.path("asked")).unwrap();
        assert_eq!(install(&machine.here(), Kind::Cpu).unwrap(), first);
        assert!(!machine.path("asked").exists());
    }

    #[test]
    fn all_is_installed_where_the_two_do_not_make_it_load() {
        let machine = machine_with_pip(":", r#"case "$0" in *libtorch-cpu*) exit 1;; esac"#);
        let libtorch = install(&machine.here(), Kind::Cpu).unwrap();
        assert_eq!(libtorch.source, Source::OwnEnvironment(Kind::Full));
        assert_eq!(asked(&machine).last().unwrap(), "raw torch==2.11.0");
    }

    #[test]
    fn a_failed_installation_leaves_nothing_that_is_taken_as_whole() {
        for (torch_fails, loads) in [("exit 1", ":"), (":", "exit 1")] {
            let machine = machine_with_pip(torch_fails, loads);
            install(&machine.here(), Kind::Cpu).unwrap_err();
            assert!(machine.path("target/libtorch-cpu/venv/bin/python").exists());
            assert_eq!(of_own_environment(&machine.here()), None);
        }
    }

    #[test]
    fn a_gpu_that_appears_brings_cuda_and_a_failure_keeps_the_cpu() {
        let with_gpu = Driver::Present {
            cuda: (13, 0),
            gpus: vec![Gpu {
                name: "made up".into(),
                compute_capability: (9, 0),
            }],
        };
        let machine = machine_with_pip(":", ":");
        let cpu = install(&machine.here(), Kind::Cpu).unwrap();
        let kept = upgrade_for(&machine.here(), &Driver::Absent, cpu.clone());
        assert_eq!(kept, cpu);
        let upgraded = upgrade_for(&machine.here(), &with_gpu, cpu);
        assert_eq!(upgraded.source, Source::OwnEnvironment(Kind::Full));
        assert_eq!(of_own_environment(&machine.here()), Some(upgraded));

        let machine = machine_with_pip("case \"$*\" in *no-deps*) ;; *) exit 1;; esac", ":");
        let cpu = install(&machine.here(), Kind::Cpu).unwrap();
        assert_eq!(upgrade_for(&machine.here(), &with_gpu, cpu.clone()), cpu);
        assert_eq!(of_own_environment(&machine.here()), Some(cpu));
    }

    #[test]
    fn a_full_disk_is_told_before_the_download() {
        let error = SetUpError::Space {
            folder: "/disk".into(),
            needed: space_needed(Kind::Cpu),
            free: 100_000_000,
        };
        let shown = error.to_string();
        for part in ["1.8 GB", "/disk has 0.1 GB", "CARGO_TARGET_DIR"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let (folder, free) = free_space(Path::new("/no/such/folder")).unwrap();
        assert_eq!(folder, Path::new("/"));
        assert!(free > 0);
    }
}
