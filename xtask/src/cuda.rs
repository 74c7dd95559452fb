//! The NVIDIA driver and NVRTC, looked up as programs on this machine would find them.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

use libloading::{Library, Symbol};

/// What the driver library says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Driver {
    /// There is no libcuda to load.
    Absent,
    /// libcuda loads, and refuses: a module not loaded, no device node, a version mismatch.
    Unusable { code: c_int },
    Present {
        /// The newest CUDA the driver supports: major, minor.
        cuda: (c_int, c_int),
        gpus: Vec<Gpu>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub name: String,
    pub compute_capability: (c_int, c_int),
}

/// CUDA_ERROR_NO_DEVICE: a driver without a GPU, or with every GPU hidden.
const NO_DEVICE: c_int = 100;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

impl Driver {
    /// Asks libcuda itself: `/proc/driver/nvidia` shows through into containers that have no
    /// device, and `nvidia-smi` is often not installed beside a working driver.
    pub fn probe() -> Self {
        // SAFETY: libcuda's initialisers have no preconditions; loading it is what every CUDA
        // program does first.
        let Ok(library) = (unsafe { Library::new("libcuda.so.1") }) else {
            return Self::Absent;
        };
        match ask(&library) {
            Ok(driver) => driver,
            Err(NO_DEVICE) => Self::Present {
                cuda: driver_version(&library).unwrap_or_default(),
                gpus: Vec::new(),
            },
            Err(code) => Self::Unusable { code },
        }
    }

    pub fn has_gpu(&self) -> bool {
        matches!(self, Self::Present { gpus, .. } if !gpus.is_empty())
    }
}

/// CUDA_ERROR_NOT_FOUND stands in for a symbol that the library lacks.
const NOT_FOUND: c_int = 500;

fn check(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn driver_version(library: &Library) -> Result<(c_int, c_int), c_int> {
    let mut version = 0;
    // SAFETY: the signature is the driver API's, and the pointer is to a live integer.
    unsafe {
        let get: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> = library
            .get(b"cuDriverGetVersion\0")
            .map_err(|_| NOT_FOUND)?;
        check(get(&mut version))?;
    }
    Ok((version / 1000, version % 1000 / 10))
}

fn ask(library: &Library) -> Result<Driver, c_int> {
    type Init = unsafe extern "C" fn(u32) -> c_int;
    type GetCount = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

    // SAFETY: the signatures are the driver API's (CUresult and CUdevice are C ints), cuInit comes
    // first, every pointer is to a live local, and cuDeviceGetName writes at most the length given
    // with a final NUL.
    unsafe {
        let missing = |_| NOT_FOUND;
        let init: Symbol<Init> = library.get(b"cuInit\0").map_err(missing)?;
        let get_count: Symbol<GetCount> = library.get(b"cuDeviceGetCount\0").map_err(missing)?;
        let get: Symbol<Get> = library.get(b"cuDeviceGet\0").map_err(missing)?;
        let get_name: Symbol<GetName> = library.get(b"cuDeviceGetName\0").map_err(missing)?;
        let get_attribute: Symbol<GetAttribute> =
            library.get(b"cuDeviceGetAttribute\0").map_err(missing)?;

        check(init(0))?;
        let mut count = 0;
        check(get_count(&mut count))?;
        let mut gpus = Vec::new();
        for ordinal in 0..count {
            let mut device = 0;
            check(get(&mut device, ordinal))?;
            let mut name = [0 as c_char; 256];
            check(get_name(name.as_mut_ptr(), name.len() as c_int, device))?;
            let (mut major, mut minor) = (0, 0);
            check(get_attribute(&mut major, COMPUTE_CAPABILITY_MAJOR, device))?;
            check(get_attribute(&mut minor, COMPUTE_CAPABILITY_MINOR, device))?;
            gpus.push(Gpu {
                name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                compute_capability: (major, minor),
            });
        }
        Ok(Driver::Present {
            cuda: driver_version(library)?,
            gpus,
        })
    }
}

/// The NVRTC library: beside torch, where its wheels put it, else where the loader finds it.
pub fn find_nvrtc(libtorch: Option<&Path>) -> Option<PathBuf> {
    let beside = libtorch
        .and_then(Path::parent)
        .map(|site| site.join("nvidia"));
    let packages = beside
        .iter()
        .flat_map(std::fs::read_dir)
        .flatten()
        .flatten();
    let of_wheels = packages.map(|package| package.path().join("lib"));
    let of_toolkit = PathBuf::from("/usr/local/cuda/lib64");
    let found = of_wheels.chain([of_toolkit]).find_map(|folder| {
        let files = std::fs::read_dir(folder).ok()?.flatten();
        let mut libraries = files.map(|file| file.path()).filter(|path| is_nvrtc(path));
        libraries.next()
    });
    found.or_else(|| {
        let names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"];
        // SAFETY: NVRTC is a compiler library whose initialisers have no preconditions.
        let loads = |name: &&str| unsafe { Library::new(*name) }.is_ok();
        names.into_iter().find(loads).map(PathBuf::from)
    })
}

/// `libnvrtc-builtins.so.13.0` lies in the same folder and is not it.
fn is_nvrtc(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("libnvrtc.so") || name.starts_with("libnvrtc.dylib")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    #[test]
    fn nvrtc_is_found_beside_the_wheel() {
        let machine = Machine::bare();
        let torch = machine.wheel("site-packages/torch", "2.11.0");
        machine.file(
            "site-packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
            "",
        );
        let library = machine.file("site-packages/nvidia/cu13/lib/libnvrtc.so.13", "");
        assert_eq!(find_nvrtc(Some(&torch)), Some(library));
    }

    #[test]
    fn a_driver_counts_only_with_a_gpu() {
        let gpu = Gpu {
            name: "made up".into(),
            compute_capability: (9, 0),
        };
        let with = |gpus| Driver::Present {
            cuda: (13, 0),
            gpus,
        };
        assert!(with(vec![gpu]).has_gpu());
        assert!(!with(Vec::new()).has_gpu());
        assert!(!Driver::Absent.has_gpu());
        assert!(!Driver::Unusable { code: 999 }.has_gpu());
    }
}
