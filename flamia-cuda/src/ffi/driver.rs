//! The driver, asked before anything else is: what cudarc opens it with panics where it is missing.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, result, sys};

use crate::error::GpuError;
use crate::version::{OLDEST, Version};

/// Starts the driver and returns the newest CUDA that it supports.
pub fn start() -> Result<Version, GpuError> {
    let mut version = 0;
    // SAFETY: libcuda's initialisers have no preconditions. The version may be asked for before
    // the driver is started, and the pointer is to a live integer.
    let status = unsafe {
        if !sys::is_culib_present() {
            return Err(GpuError::NoDriver);
        }
        sys::cuDriverGetVersion(&mut version)
    };
    check("tell its version", status.result())?;
    let found = Version {
        major: version / 1000,
        minor: version % 1000 / 10,
    };
    if found < OLDEST {
        return Err(GpuError::DriverTooOld { found });
    }
    match result::init() {
        Ok(()) => Ok(found),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Err(GpuError::NoGpu),
        Err(error) => {
            let (status, text) = told(error);
            Err(GpuError::DriverUnusable { status, text })
        }
    }
}

/// The primary context of a GPU, which is not made current by it: what was current stays so.
pub fn open(ordinal: usize) -> Result<Arc<CudaContext>, GpuError> {
    let current = check("tell the current context", result::ctx::get_current())?;
    let opened = CudaContext::new(ordinal);
    let before = current.unwrap_or(std::ptr::null_mut());
    // SAFETY: the context that was current, or none.
    let restored = unsafe { result::ctx::set_current(before) };
    check("make a context current", restored)?;
    check("open the GPU", opened)
}

/// The result, its error told with what was tried.
pub fn check<T>(doing: &'static str, result: Result<T, DriverError>) -> Result<T, GpuError> {
    result.map_err(|error| {
        let (status, text) = told(error);
        GpuError::Driver {
            doing,
            status,
            text,
        }
    })
}

/// The driver's name of the failure, and its sentence.
pub fn told(error: DriverError) -> (String, String) {
    let text = error
        .error_string()
        .map(|text| text.to_string_lossy().into_owned());
    (
        format!("{:?}", error.0),
        text.unwrap_or_else(|_| "no reason given".to_owned()),
    )
}

/// The context is current on this thread while the value lives. The one that was current before is
/// current again afterwards: CUDA's runtime, and so torch, takes it for the current device.
pub struct Current {
    is_pushed: bool,
    /// The stack of contexts is the thread's own.
    not_send: PhantomData<*const ()>,
}

impl Current {
    pub fn make(context: &CudaContext) -> Result<Self, GpuError> {
        let wanted = context.cu_ctx();
        let mut current = std::ptr::null_mut();
        // SAFETY: the context is alive, and the pointer is to a live local. A push is undone by
        // the only drop of the value, on the same thread, since it is not Send.
        unsafe {
            check(
                "tell the current context",
                sys::cuCtxGetCurrent(&mut current).result(),
            )?;
            let is_pushed = current != wanted;
            if is_pushed {
                check(
                    "make a context current",
                    sys::cuCtxPushCurrent_v2(wanted).result(),
                )?;
            }
            Ok(Self {
                is_pushed,
                not_send: PhantomData,
            })
        }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `make` pushed.
            unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}
