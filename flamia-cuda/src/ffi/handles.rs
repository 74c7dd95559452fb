//! Values that own what the driver hands out. Each keeps its context alive.

use std::ffi::{CString, c_int};
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::driver::{Current, check, told};
use crate::cubin::Cubin;
use crate::error::GpuError;
use crate::launch::{Launch, sealed::Argument};

/// A `CUstream`, which any thread may use.
#[derive(Clone, Copy, Debug)]
pub struct RawStream(pub sys::CUstream);

// SAFETY: the driver takes a stream on any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// A loaded cubin.
#[derive(Debug)]
pub struct ModuleHandle {
    module: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: the driver takes a module on any thread where its context is current.
unsafe impl Send for ModuleHandle {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for ModuleHandle {}

impl ModuleHandle {
    pub fn load(context: &Arc<CudaContext>, cubin: &Cubin) -> Result<Self, GpuError> {
        let _current = Current::make(context)?;
        // SAFETY: a whole image, as NVRTC made it and nothing changed it, which the driver copies.
        let module = unsafe { result::module::load_data(cubin.image().as_ptr().cast()) };
        Ok(Self {
            module: check("load a cubin", module)?,
            context: Arc::clone(context),
        })
    }

    pub fn function(self: &Arc<Self>, name: CString) -> Result<FunctionHandle, GpuError> {
        let _current = Current::make(&self.context)?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, name) };
        Ok(FunctionHandle {
            function: check("find a kernel in its module", function)?,
            module: Arc::clone(self),
        })
    }
}

impl Drop for ModuleHandle {
    fn drop(&mut self) {
        let Ok(_current) = Current::make(&self.context) else {
            return;
        };
        // SAFETY: loaded by `load`, and every function of it is gone. A failure leaks the module.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// A kernel of a module.
#[derive(Debug)]
pub struct FunctionHandle {
    function: sys::CUfunction,
    module: Arc<ModuleHandle>,
}

// SAFETY: the driver takes a function on any thread where its context is current.
unsafe impl Send for FunctionHandle {}
// SAFETY: as above.
unsafe impl Sync for FunctionHandle {}

impl FunctionHandle {
    /// The size of each parameter, in bytes.
    pub fn parameters(&self) -> Result<Vec<usize>, GpuError> {
        let _current = Current::make(&self.module.context)?;
        let mut sizes = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function's module is loaded, and the pointers are to live locals.
            let status = unsafe {
                sys::cuFuncGetParamInfo(self.function, sizes.len(), &mut offset, &mut size)
            };
            // How the driver says that the index is one too many.
            if status == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
                return Ok(sizes);
            }
            check("tell a kernel's parameters", status.result())?;
            sizes.push(size);
        }
    }

    /// Bytes of static shared memory.
    pub fn static_shared(&self) -> Result<u32, GpuError> {
        let _current = Current::make(&self.module.context)?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let mut bytes: c_int = 0;
        // SAFETY: the function's module is loaded, and the pointer is to a live local.
        let status = unsafe { sys::cuFuncGetAttribute(&mut bytes, attribute, self.function) };
        check("tell a kernel's shared memory", status.result())?;
        Ok(bytes.unsigned_abs())
    }

    pub fn set_dynamic_shared(&self, bytes: u32) -> Result<(), GpuError> {
        let _current = Current::make(&self.module.context)?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function's module is loaded.
        let status = unsafe { sys::cuFuncSetAttribute(self.function, attribute, bytes) };
        check("set a kernel's shared memory", status.result())
    }

    /// # Safety
    /// The arguments have the parameters' sizes. The rest is what [`crate::Kernel::launch`] asks.
    pub unsafe fn launch(
        &self,
        name: &str,
        stream: RawStream,
        launch: Launch,
        arguments: &[Argument],
    ) -> Result<(), GpuError> {
        const MOST: usize = 16;
        let mut addresses = [std::ptr::null_mut(); MOST];
        for (address, argument) in addresses.iter_mut().zip(arguments) {
            *address = argument.address.cast_mut();
        }
        let mut early_start = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared,
            hStream: stream.0,
            attrs: &mut early_start,
            numAttrs: launch.starts_early.into(),
        };
        let _current = Current::make(&self.module.context)?;
        // SAFETY: the function's module is loaded and its context current. The driver copies the
        // configuration and the arguments before it returns, as many bytes of each as its parameter
        // has.
        let launched = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.function,
                addresses.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        launched.result().map_err(|error| {
            let (status, text) = told(error);
            GpuError::Launch {
                kernel: name.to_owned(),
                launch,
                status,
                text,
            }
        })
    }
}

/// A graph that can be replayed.
#[derive(Debug)]
pub struct GraphHandle {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    context: Arc<CudaContext>,
}

// SAFETY: the driver takes a graph on any thread, one at a time: replays borrow it mutably.
unsafe impl Send for GraphHandle {}

impl GraphHandle {
    pub fn launch(&mut self, stream: RawStream) -> Result<(), GpuError> {
        let _current = Current::make(&self.context)?;
        // SAFETY: the graph is alive, and the stream is by `Stream`.
        let launched = unsafe { result::graph::launch(self.executable, stream.0) };
        check("replay a graph", launched)
    }
}

impl Drop for GraphHandle {
    fn drop(&mut self) {
        let Ok(_current) = Current::make(&self.context) else {
            return;
        };
        // SAFETY: both are ours, and destroyed once. A replay that still runs is finished by the
        // driver, which waits for nothing here. A failure leaks them.
        unsafe {
            let _ = result::graph::exec_destroy(self.executable);
            let _ = result::graph::destroy(self.graph);
        }
    }
}

/// A stream that captures until the value is ended, or dropped.
pub struct Capture<'a> {
    stream: RawStream,
    context: &'a Arc<CudaContext>,
    is_ended: bool,
}

impl<'a> Capture<'a> {
    pub fn begin(context: &'a Arc<CudaContext>, stream: RawStream) -> Result<Self, GpuError> {
        let _current = Current::make(context)?;
        // Of this thread alone: what others allocate meanwhile is no error.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive by `Stream`.
        let begun = unsafe { result::stream::begin_capture(stream.0, mode) };
        check("capture this stream", begun)?;
        Ok(Self {
            stream,
            context,
            is_ended: false,
        })
    }

    pub fn end(mut self) -> Result<GraphHandle, GpuError> {
        let _current = Current::make(self.context)?;
        self.is_ended = true;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the stream is alive and captures, and the graph is instantiated before it is
        // given away or destroyed.
        unsafe {
            let graph = check(
                "end the capture",
                result::stream::end_capture(self.stream.0),
            )?;
            match result::graph::instantiate(graph, flags) {
                Ok(executable) => Ok(GraphHandle {
                    graph,
                    executable,
                    context: Arc::clone(self.context),
                }),
                Err(error) => {
                    let _ = result::graph::destroy(graph);
                    check("instantiate a graph", Err(error))
                }
            }
        }
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        let Ok(_current) = Current::make(self.context) else {
            return;
        };
        // SAFETY: the stream is alive and captures; what it captured is dropped. An invalidated
        // capture ends with an error and without a graph.
        unsafe {
            if let Ok(graph) = result::stream::end_capture(self.stream.0)
                && !graph.is_null()
            {
                let _ = result::graph::destroy(graph);
            }
        }
    }
}

/// A point of time on a stream.
#[derive(Debug)]
pub struct EventHandle {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: the driver takes an event on any thread.
unsafe impl Send for EventHandle {}
// SAFETY: as above.
unsafe impl Sync for EventHandle {}

impl EventHandle {
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, GpuError> {
        let _current = Current::make(context)?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        Ok(Self {
            event: check("create an event", event)?,
            context: Arc::clone(context),
        })
    }

    pub fn record(&self, stream: RawStream) -> Result<(), GpuError> {
        let _current = Current::make(&self.context)?;
        // SAFETY: the event is alive, and the stream is by `Stream`.
        check("record an event", unsafe {
            result::event::record(self.event, stream.0)
        })
    }

    /// Waits for `end`, and returns the milliseconds from `self` to it.
    pub fn milliseconds_to(&self, end: &Self) -> Result<f32, GpuError> {
        let _current = Current::make(&self.context)?;
        // SAFETY: both events are alive and were created for timing.
        unsafe {
            check("wait for an event", result::event::synchronize(end.event))?;
            check(
                "tell the time between events",
                result::event::elapsed(self.event, end.event),
            )
        }
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        let Ok(_current) = Current::make(&self.context) else {
            return;
        };
        // SAFETY: ours, and destroyed once; the driver waits for what was recorded by itself.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// Device memory.
#[derive(Debug)]
pub struct MemoryHandle {
    address: sys::CUdeviceptr,
    bytes: usize,
    context: Arc<CudaContext>,
}

impl MemoryHandle {
    /// At least one byte, so that every memory has an address.
    pub fn allocate(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, GpuError> {
        let _current = Current::make(context)?;
        // SAFETY: a context is current.
        let address = unsafe { result::malloc_sync(bytes.max(1)) };
        Ok(Self {
            address: check("allocate memory", address)?,
            bytes,
            context: Arc::clone(context),
        })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// Fills the memory from its start, after all work that was given to the GPU before.
    pub fn write(&mut self, data: &[u8]) -> Result<(), GpuError> {
        assert!(data.len() <= self.bytes, "memory of {} bytes", self.bytes);
        let _current = Current::make(&self.context)?;
        wait()?;
        // SAFETY: the memory is ours and has these bytes, and nothing uses it meanwhile.
        let copied = unsafe { result::memcpy_htod_sync(self.address, data) };
        check("copy to the GPU", copied)?;
        // The copy may still be under way, and only the default stream waits for it.
        wait()
    }

    pub fn fill(&mut self, byte: u8) -> Result<(), GpuError> {
        let _current = Current::make(&self.context)?;
        wait()?;
        // SAFETY: the memory is ours and has these bytes, and nothing uses it meanwhile.
        let filled = unsafe { result::memset_d8_sync(self.address, byte, self.bytes) };
        check("fill memory", filled)?;
        wait()
    }

    /// Reads the memory from its start, after all work that was given to the GPU before.
    pub fn read(&self, data: &mut [u8]) -> Result<(), GpuError> {
        assert!(data.len() <= self.bytes, "memory of {} bytes", self.bytes);
        let _current = Current::make(&self.context)?;
        wait()?;
        // SAFETY: the memory is ours and has these bytes, and nothing writes to it meanwhile.
        check("copy from the GPU", unsafe {
            result::memcpy_dtoh_sync(data, self.address)
        })
    }
}

impl Drop for MemoryHandle {
    fn drop(&mut self) {
        let Ok(_current) = Current::make(&self.context) else {
            return;
        };
        // SAFETY: ours, and freed once; the driver waits for the GPU first. A failure leaks it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

fn wait() -> Result<(), GpuError> {
    check("wait for the GPU", result::ctx::synchronize())
}

/// Waits for all work that was given to the GPU.
pub fn synchronize(context: &CudaContext) -> Result<(), GpuError> {
    let _current = Current::make(context)?;
    wait()
}
