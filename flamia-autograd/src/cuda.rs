//! Loads torch's CUDA library at run time, so that one binary serves machines with and without a
//! GPU: nothing refers to a symbol of libtorch_cuda, and a linker drops what nothing refers to.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use flamia_cuda::Stream;

/// Why a GPU that is there cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaLoadError {
    /// The device file exists but the driver's library does not load, as in a container that was
    /// given the device alone.
    #[error(
        "there is an NVIDIA device ({device}) but its driver library does not load: {reason}; install the driver, or start the container with the NVIDIA runtime"
    )]
    DriverLibrary {
        /// The device file.
        device: &'static str,
        /// The dynamic linker's words.
        reason: String,
    },

    /// The driver refuses to start.
    #[error(
        "the NVIDIA driver does not start: {function} returned CUDA error {code}; `nvidia-smi` may say more"
    )]
    Driver {
        /// The driver function that failed.
        function: &'static str,
        /// Its CUresult.
        code: c_int,
    },

    /// The process has no libtorch_cpu that was loaded from a file.
    #[error(
        "no libtorch_cpu.so is loaded in this process, so libtorch_cuda.so cannot be found beside it; link libtorch dynamically"
    )]
    NoTorchFolder,

    /// libtorch was built for the CPU only.
    #[error(
        "there is a GPU but {} does not exist: this libtorch is a CPU build; point LIBTORCH at the CUDA build of torch 2.11.0, or use the CPU device",
        path.display()
    )]
    LibraryMissing {
        /// The file that was looked for.
        path: PathBuf,
    },

    /// libtorch_cuda is there and does not load, usually for want of another library.
    #[error(
        "there is a GPU but {} does not load: {reason}; reinstall torch 2.11.0 with its CUDA dependencies, or use the CPU device",
        path.display()
    )]
    Library {
        /// The file that was loaded.
        path: PathBuf,
        /// The dynamic linker's words.
        reason: String,
    },

    /// Everything loaded, and torch still sees no GPU.
    #[error(
        "{} is loaded but torch sees no GPU; call load_cuda before anything else that asks torch about CUDA, and check that the driver is new enough for this torch",
        path.display()
    )]
    Unavailable {
        /// The file that was loaded.
        path: PathBuf,
    },
}

/// Makes torch's CUDA devices usable if there is a GPU, and says whether there is one.
///
/// To be called before anything that asks torch about CUDA: torch looks for its CUDA part once
/// and remembers what it found. After the first call the answer is remembered here too.
/// `CUDA_VISIBLE_DEVICES` is respected.
///
/// # Errors
/// There is a GPU, and the error says why it cannot be used.
pub fn load_cuda() -> Result<bool, CudaLoadError> {
    static ANSWER: OnceLock<Result<bool, CudaLoadError>> = OnceLock::new();
    ANSWER
        .get_or_init(|| {
            if !driver_sees_gpu()? {
                return Ok(false);
            }
            let folder = torch_folder().ok_or(CudaLoadError::NoTorchFolder)?;
            let path = load_library_in(&folder)?;
            if tch::Cuda::is_available() {
                Ok(true)
            } else {
                Err(CudaLoadError::Unavailable { path })
            }
        })
        .clone()
}

/// torch's current stream of a GPU cannot be asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CurrentStreamError {
    /// libtorch_cuda is not there.
    #[error("torch's CUDA library is not loaded: call load_cuda before the first use of a GPU")]
    NotLoaded,
    /// torch refuses.
    #[error("torch has no current stream for GPU {ordinal} (error {code})")]
    Refused {
        /// The GPU.
        ordinal: usize,
        /// torch's code.
        code: i32,
    },
}

/// The stream that torch gives work to now, on this thread.
pub(crate) fn current_stream(ordinal: usize) -> Result<Stream<'static>, CurrentStreamError> {
    // SAFETY: a C string; the default handle searches what is loaded globally, as libtorch_cuda is.
    let function = unsafe {
        libc::dlsym(
            libc::RTLD_DEFAULT,
            c"aoti_torch_get_current_cuda_stream".as_ptr(),
        )
    };
    if function.is_null() {
        return Err(CurrentStreamError::NotLoaded);
    }
    // SAFETY: the signature in torch's stable C interface (aoti_torch/c/shim.h).
    let function = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(i32, *mut *mut c_void) -> i32>(
            function,
        )
    };
    let mut stream = std::ptr::null_mut();
    let index = i32::try_from(ordinal).unwrap_or(i32::MAX);
    // SAFETY: `stream` outlives the call.
    match unsafe { function(index, &mut stream) } {
        // SAFETY: torch's streams live as long as the process.
        0 => Ok(unsafe { Stream::from_raw(stream) }),
        code => Err(CurrentStreamError::Refused { ordinal, code }),
    }
}

/// Asks the driver, which is the only one to know: a driver library without a GPU is common in
/// container images.
fn driver_sees_gpu() -> Result<bool, CudaLoadError> {
    const DEVICE: &str = "/dev/nvidia0";
    const STUB_LIBRARY: c_int = 34;
    const NO_DEVICE: c_int = 100;

    let driver = match dlopen(c"libcuda.so.1", libc::RTLD_NOW) {
        Ok(driver) => driver,
        Err(reason) if Path::new(DEVICE).exists() => {
            return Err(CudaLoadError::DriverLibrary {
                device: DEVICE,
                reason,
            });
        }
        Err(_) => return Ok(false),
    };
    // SAFETY: `driver` is a handle from dlopen, never closed.
    let (init, get_count) = unsafe {
        (
            libc::dlsym(driver, c"cuInit".as_ptr()),
            libc::dlsym(driver, c"cuDeviceGetCount".as_ptr()),
        )
    };
    if init.is_null() || get_count.is_null() {
        return Ok(false);
    }
    // SAFETY: the signatures are those of the CUDA driver API, `CUresult` being an int.
    let (init, get_count) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_uint) -> c_int>(init),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(
                get_count,
            ),
        )
    };

    // SAFETY: cuInit may be called at any time, any number of times; it makes no context.
    match unsafe { init(0) } {
        0 => {}
        NO_DEVICE | STUB_LIBRARY => return Ok(false),
        code => {
            return Err(CudaLoadError::Driver {
                function: "cuInit",
                code,
            });
        }
    }
    let mut count = 0;
    // SAFETY: the driver is initialised and `count` outlives the call.
    match unsafe { get_count(&mut count) } {
        0 => Ok(count > 0),
        code => Err(CudaLoadError::Driver {
            function: "cuDeviceGetCount",
            code,
        }),
    }
}

/// The folder that this process loaded libtorch_cpu from: the CUDA part must be of the same build.
fn torch_folder() -> Option<PathBuf> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        folder: *mut c_void,
    ) -> c_int {
        // SAFETY: the dynamic linker passes a valid `info`, and `folder` is the one given below.
        let (name, folder) = unsafe { ((*info).dlpi_name, &mut *folder.cast::<Option<PathBuf>>()) };
        if name.is_null() {
            return 0;
        }
        // SAFETY: a non-null name is a C string.
        let path = Path::new(OsStr::from_bytes(
            unsafe { CStr::from_ptr(name) }.to_bytes(),
        ));
        if path.file_name() == Some(OsStr::new("libtorch_cpu.so")) {
            *folder = path.parent().map(Path::to_path_buf);
            return 1;
        }
        0
    }

    let mut folder: Option<PathBuf> = None;
    // SAFETY: `visit` matches the callback's type and `folder` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut folder).cast()) };
    folder
}

/// Loads libtorch_cuda from `folder` for the rest of the process and returns its path.
fn load_library_in(folder: &Path) -> Result<PathBuf, CudaLoadError> {
    let path = folder.join("libtorch_cuda.so");
    if !path.exists() {
        return Err(CudaLoadError::LibraryMissing { path });
    }
    // A path that exists has no NUL byte.
    let c_path = CString::new(path.clone().into_os_string().into_vec()).unwrap_or_default();
    // Global, because its own plug-ins look its symbols up in the process.
    match dlopen(&c_path, libc::RTLD_NOW | libc::RTLD_GLOBAL) {
        Ok(_) => Ok(path),
        Err(reason) => Err(CudaLoadError::Library { path, reason }),
    }
}

/// A handle that is never closed: both libraries register things that live as long as the process.
fn dlopen(name: &CStr, flags: c_int) -> Result<*mut c_void, String> {
    // SAFETY: `name` is a C string. The libraries' initialisers are NVIDIA's and torch's own.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: dlerror returns null or a C string that is valid until this thread's next dl call.
    let reason: *const c_char = unsafe { libc::dlerror() };
    if reason.is_null() {
        return Err("no reason given".to_owned());
    }
    // SAFETY: as above.
    Err(unsafe { CStr::from_ptr(reason) }
        .to_string_lossy()
        .into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn finds_the_folder_of_the_loaded_torch() {
        // A call into torch, so that the test binary links it.
        assert!(tch::Tensor::from(1.0).defined());
        let folder = torch_folder().expect("libtorch_cpu.so is loaded");
        assert!(
            folder.join("libtorch_cpu.so").is_file(),
            "{}",
            folder.display()
        );
    }

    #[test]
    fn a_missing_library_is_named_with_a_remedy() {
        let folder = Path::new("/nowhere/torch/lib");
        let error = load_library_in(folder).unwrap_err();
        assert_eq!(
            error,
            CudaLoadError::LibraryMissing {
                path: folder.join("libtorch_cuda.so")
            }
        );
        let text = error.to_string();
        assert!(
            text.contains("/nowhere/torch/lib/libtorch_cuda.so"),
            "{text}"
        );
        assert!(text.contains("LIBTORCH"), "{text}");
    }

    #[test]
    fn a_broken_library_is_named_with_the_linkers_reason() {
        let folder = std::env::temp_dir().join(format!("flamia-cuda-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("libtorch_cuda.so"), "not a library").unwrap();
        let error = load_library_in(&folder).unwrap_err();
        fs::remove_dir_all(&folder).unwrap();
        match error {
            CudaLoadError::Library { path, reason } => {
                assert_eq!(path, folder.join("libtorch_cuda.so"));
                assert!(reason.contains("libtorch_cuda.so"), "{reason}");
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_answer_is_remembered_and_torch_agrees() {
        let first = load_cuda();
        assert_eq!(first, load_cuda());
        assert_eq!(first == Ok(true), tch::Cuda::is_available());
    }
}
