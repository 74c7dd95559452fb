//! The NVIDIA driver, looked up as programs on this machine would find it.

use std::ffi::{CStr, c_char, c_int};

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

#[cfg(test)]
mod tests {
    use super::*;

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
