//! Where NVRTC is: the one that is set, else the loader's, torch's, or the CUDA toolkit's.

use std::env;
use std::error::Error;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::ffi::nvrtc::{Nvrtc, keep_open};
use crate::version::{OLDEST, Version};

/// The environment variable that names NVRTC's library, or the folder that holds it.
pub(crate) const SETTING: &str = "FLAMIA_NVRTC";

/// There is no NVRTC that serves.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// The one that the environment variable names does not serve, and no other was looked for.
    #[error("{SETTING} is {}, and {refusal}\n{REMEDY}", .path.display())]
    Setting {
        /// The variable's value.
        path: PathBuf,
        /// Why it does not serve.
        refusal: Refusal,
    },
    /// None was found, or none that serves.
    #[error("CUDA's run-time compiler, NVRTC, is needed and was not found:{}\n{REMEDY}", lines(.tried))]
    NotFound {
        /// Where it was looked for, and what was wrong there.
        tried: Vec<(PathBuf, Refusal)>,
    },
}

const REMEDY: &str = "  To mend it: `cargo xtask` commands install NVRTC and set FLAMIA_NVRTC. \
    Elsewhere, `pip install nvidia-cuda-nvrtc==13.0.88` and set FLAMIA_NVRTC to the folder \
    site-packages/nvidia/cu13/lib where that puts it";

/// Why a library does not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Neither a library, nor a folder that holds one.
    #[error("there is no libnvrtc.so there")]
    Absent,
    /// The loader refuses it, or it lacks a function.
    #[error("it does not load: {0}")]
    DoesNotLoad(String),
    /// Its cubins would lack what the kernels use.
    #[error("it is NVRTC {found}, and {OLDEST} or newer is needed")]
    TooOld {
        /// The library's version.
        found: Version,
    },
}

fn lines(tried: &[(PathBuf, Refusal)]) -> impl fmt::Display {
    let line = |(path, refusal): &(PathBuf, Refusal)| format!("\n  {}: {refusal}", path.display());
    tried.iter().map(line).collect::<String>()
}

/// An open NVRTC that serves.
pub(crate) struct Found {
    pub nvrtc: Nvrtc,
    pub version: Version,
    pub library: PathBuf,
}

/// Opens the NVRTC that the environment names, else the first that serves of those in the usual
/// places.
pub(crate) fn find() -> Result<Found, NvrtcError> {
    let var = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(path) = var(SETTING) {
        let opened = library_at(&path).and_then(|library| open(&library));
        return opened.map_err(|refusal| NvrtcError::Setting { path, refusal });
    }

    let mut tried = Vec::new();
    for name in NAMES {
        match open(Path::new(name)) {
            Ok(found) => return Ok(found),
            Err(refusal) => tried.push((PathBuf::from(name), refusal)),
        }
    }
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(var);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]);
    let folders = torch_folders(&mapped_files()).into_iter();
    for folder in folders.chain(toolkits.map(|toolkit| toolkit.join("lib64"))) {
        match library_at(&folder).and_then(|library| open(&library)) {
            Ok(found) => return Ok(found),
            Err(refusal) => tried.push((folder, refusal)),
        }
    }
    Err(NvrtcError::NotFound { tried })
}

/// As the loader finds it: by the current major version, else whatever is installed to link with.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so"];

/// The library that is this file or lies in this folder, the newest where there are several.
fn library_at(path: &Path) -> Result<PathBuf, Refusal> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let files = fs::read_dir(path).map_err(|_| Refusal::Absent)?.flatten();
    let version = |name: &str| -> Option<Vec<u32>> {
        let version = name.strip_prefix("libnvrtc.so")?;
        version
            .split('.')
            .skip(1)
            .map(|part| part.parse().ok())
            .collect()
    };
    let libraries =
        files.filter_map(|file| Some((version(file.file_name().to_str()?)?, file.path())));
    libraries
        .max()
        .map(|(_, library)| library)
        .ok_or(Refusal::Absent)
}

/// Opens a library, or one that the loader finds by its bare name, with its builtins.
fn open(library: &Path) -> Result<Found, Refusal> {
    let nvrtc = Nvrtc::open(library).map_err(does_not_load)?;
    let version = nvrtc
        .version()
        .map_err(|status| Refusal::DoesNotLoad(status.name))?;
    require(version)?;
    let is_bare = library.parent() == Some(Path::new(""));
    let by_the_loader = || {
        let mut files = mapped_files().into_iter();
        files.find(|file| file_name(file).starts_with("libnvrtc.so"))
    };
    let library = is_bare
        .then(by_the_loader)
        .flatten()
        .unwrap_or_else(|| library.to_owned());

    // NVRTC opens it by this name on the first compilation, and the loader does not look beside
    // NVRTC. One that is already open is found by its name.
    let builtins = library.with_file_name(format!("libnvrtc-builtins.so.{version}"));
    if builtins.exists() {
        keep_open(&builtins).map_err(does_not_load)?;
    }
    Ok(Found {
        nvrtc,
        version,
        library,
    })
}

fn does_not_load(error: libloading::Error) -> Refusal {
    // The loader's own words are beneath the error's.
    let words = error
        .source()
        .map_or_else(|| error.to_string(), ToString::to_string);
    Refusal::DoesNotLoad(words)
}

fn require(found: Version) -> Result<(), Refusal> {
    if found < OLDEST {
        Err(Refusal::TooOld { found })
    } else {
        Ok(())
    }
}

fn file_name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// The files that are mapped into this process, its shared libraries among them. Empty on a system
/// that does not tell.
fn mapped_files() -> Vec<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // Address, permissions, offset, device, inode, and then the path to the line's end.
    let path = |line: &str| Some(PathBuf::from(&line[line.find('/')?..]));
    let mut files: Vec<_> = maps.lines().filter_map(path).collect();
    files.dedup();
    files
}

/// The folders of NVIDIA's wheels, beside the torch that is loaded: `site-packages/torch/lib` and
/// `site-packages/nvidia/cu13/lib`.
fn torch_folders(loaded: &[PathBuf]) -> Vec<PathBuf> {
    let torch = loaded
        .iter()
        .find(|file| file_name(file).starts_with("libtorch_cpu."));
    let packages = torch.and_then(|library| Some(library.ancestors().nth(3)?.join("nvidia")));
    let packages = packages
        .into_iter()
        .flat_map(fs::read_dir)
        .flatten()
        .flatten();
    let mut folders: Vec<_> = packages
        .map(|package| package.path().join("lib"))
        .filter(|folder| library_at(folder).is_ok())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_gives_its_newest_library_and_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            fs::write(&path, "").unwrap();
            path
        };
        file("libnvrtc-builtins.so.13.0");
        file("libnvrtc.alt.so.13");
        assert_eq!(library_at(folder.path()), Err(Refusal::Absent));
        let plain = file("libnvrtc.so");
        assert_eq!(library_at(folder.path()), Ok(plain));
        file("libnvrtc.so.9");
        let newest = file("libnvrtc.so.13");
        assert_eq!(library_at(folder.path()), Ok(newest.clone()));
        assert_eq!(library_at(&newest), Ok(newest));
        assert_eq!(
            library_at(&folder.path().join("none")),
            Err(Refusal::Absent)
        );
    }

    #[test]
    fn what_is_no_library_is_refused_with_the_loaders_words() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("libnvrtc.so.13"), "text").unwrap();
        let Err(Refusal::DoesNotLoad(reason)) = open(&folder.path().join("libnvrtc.so.13")) else {
            panic!("a text file was opened");
        };
        assert!(reason.contains("libnvrtc.so.13"), "{reason}");
    }

    #[test]
    fn an_old_one_is_refused_with_both_versions() {
        let found = Version {
            major: 12,
            minor: 8,
        };
        let refusal = require(found).unwrap_err();
        let error = NvrtcError::NotFound {
            tried: vec![("/cuda/lib64".into(), refusal)],
        };
        let shown = error.to_string();
        for part in [
            "/cuda/lib64",
            "12.8",
            "13.0 or newer",
            "nvidia-cuda-nvrtc==13.0.88",
            SETTING,
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(require(OLDEST), Ok(()));
    }

    #[test]
    fn torchs_wheels_are_found_from_its_library() {
        let site = tempfile::tempdir().unwrap();
        let lib = site.path().join("nvidia/cu13/lib");
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir_all(site.path().join("nvidia/cudnn/lib")).unwrap();
        fs::write(lib.join("libnvrtc.so.13"), "").unwrap();
        let loaded =
            ["usr/lib/libc.so.6", "torch/lib/libtorch_cpu.so"].map(|file| site.path().join(file));
        assert_eq!(torch_folders(&loaded), [lib]);
        assert!(torch_folders(&loaded[..1]).is_empty());
    }

    #[test]
    fn this_process_maps_its_own_program() {
        if cfg!(target_os = "linux") {
            assert!(mapped_files().contains(&env::current_exe().unwrap()));
        }
    }
}
