//! A GPU, and the modules and kernels that are loaded on it.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{CudaContext, sys::CUdevice_attribute as Attribute};

use crate::arch::Arch;
use crate::compiler::{CompileError, Compiler};
use crate::cubin::Cubin;
use crate::error::GpuError;
use crate::ffi::driver::{check, open, start};
use crate::ffi::handles::{FunctionHandle, ModuleHandle, synchronize};
use crate::find::NvrtcError;
use crate::launch::{Arguments, Launch, Stream};
use crate::source::{Program, Source};
use crate::version::Version;

/// A GPU and its primary context, the one that torch uses as well. Clones are the same GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    facts: Arc<Facts>,
}

#[derive(Debug)]
struct Facts {
    arch: Arch,
    name: String,
    multiprocessors: u32,
    l2_bytes: usize,
    shared_bytes: u32,
    driver: Version,
}

/// A program that is not on the GPU.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// There is no compiler.
    #[error(transparent)]
    Nvrtc(#[from] NvrtcError),
    /// The program does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The GPU does not load it.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl Gpu {
    /// The GPU of this ordinal, counted from 0 in the order of `CUDA_VISIBLE_DEVICES`.
    pub fn new(ordinal: usize) -> Result<Self, GpuError> {
        let driver = start()?;
        let count = check("count the GPUs", CudaContext::device_count())?;
        let count = usize::try_from(count).unwrap_or_default();
        if count == 0 {
            return Err(GpuError::NoGpu);
        }
        if ordinal >= count {
            return Err(GpuError::NoSuchGpu { ordinal, count });
        }
        let context = open(ordinal)?;
        let name = check("tell the GPU's name", context.name())?;
        let compute_capability =
            check("tell the GPU's architecture", context.compute_capability())?;
        let Some(arch) = Arch::of(compute_capability) else {
            return Err(GpuError::Unsupported {
                name,
                compute_capability,
            });
        };
        let number = |attribute| {
            let value = check("tell the GPU's properties", context.attribute(attribute))?;
            Ok::<_, GpuError>(value.unsigned_abs())
        };
        let facts = Facts {
            arch,
            name,
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: number(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            shared_bytes: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            driver,
        };
        Ok(Self {
            context,
            facts: Arc::new(facts),
        })
    }

    /// What its kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.facts.arch
    }

    /// Its name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// How many streaming multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        self.facts.multiprocessors
    }

    /// Bytes of its L2 cache.
    pub fn l2_bytes(&self) -> usize {
        self.facts.l2_bytes
    }

    /// The most bytes of shared memory, static and dynamic together, that one block can have.
    pub fn shared_bytes(&self) -> u32 {
        self.facts.shared_bytes
    }

    /// The newest CUDA that its driver supports.
    pub fn driver(&self) -> Version {
        self.facts.driver
    }

    /// Its context, which streams are made from.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Waits for all work that was given to it. For tests and benchmarks.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        synchronize(&self.context)
    }

    /// Loads compiled kernels.
    pub fn load(&self, cubin: &Cubin) -> Result<Module, GpuError> {
        if !cubin.arch.runs_on(self.arch()) {
            return Err(GpuError::WrongArch {
                source_name: cubin.name,
                cubin: cubin.arch,
                gpu: self.name().to_owned(),
                gpu_arch: self.arch(),
            });
        }
        Ok(Module {
            handle: Arc::new(ModuleHandle::load(&self.context, cubin)?),
            source_name: cubin.name,
            kernels: cubin
                .kernels
                .iter()
                .map(|kernel| kernel.name.clone())
                .collect(),
            shared_bytes: self.shared_bytes(),
        })
    }

    /// Compiles a source for this GPU with the process's compiler and loads it.
    pub fn compile(
        &self,
        source: &Source,
        defines: &[(&str, String)],
    ) -> Result<Module, BuildError> {
        let program = Program {
            source,
            defines,
            arch: self.arch(),
        };
        let cubin = Compiler::shared()?.compile(&program)?;
        Ok(self.load(&cubin)?)
    }
}

/// Kernels that are loaded on a GPU.
#[derive(Debug)]
pub struct Module {
    handle: Arc<ModuleHandle>,
    source_name: &'static str,
    kernels: Vec<String>,
    shared_bytes: u32,
}

impl Module {
    /// The kernel of this name, which stays loaded while the value lives.
    pub fn kernel(&self, name: &str) -> Result<Kernel, GpuError> {
        let known = self.kernels.iter().any(|kernel| kernel == name);
        let Some(c_name) = CString::new(name).ok().filter(|_| known) else {
            return Err(GpuError::NoKernel {
                source_name: self.source_name,
                name: name.to_owned(),
                available: self.kernels.clone(),
            });
        };
        let function = self.handle.function(c_name)?;
        let static_shared = function.static_shared()?;
        Ok(Kernel(Arc::new(Loaded {
            name: name.to_owned(),
            parameters: function.parameters()?,
            static_shared,
            dynamic_limit: AtomicU32::new(UNTIL_SET.saturating_sub(static_shared)),
            shared_bytes: self.shared_bytes,
            function,
        })))
    }
}

/// Bytes of shared memory that a block has without asking, static and dynamic together.
const UNTIL_SET: u32 = 48 << 10;

/// A kernel on a GPU. Clones are the same kernel.
#[derive(Clone, Debug)]
pub struct Kernel(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    function: FunctionHandle,
    name: String,
    parameters: Vec<usize>,
    static_shared: u32,
    /// Bytes of dynamic shared memory that launches may ask for.
    dynamic_limit: AtomicU32,
    shared_bytes: u32,
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Lets launches ask for up to this many bytes of dynamic shared memory. Needed above 48 KiB.
    pub fn set_shared_limit(&self, bytes: u32) -> Result<(), GpuError> {
        let limit = self.0.shared_bytes.saturating_sub(self.0.static_shared);
        if bytes > limit {
            return Err(self.too_much_shared(bytes, limit, true));
        }
        self.0.function.set_dynamic_shared(bytes)?;
        self.0.dynamic_limit.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Gives the kernel to the stream, and returns without waiting for it. Into a graph, where the
    /// stream captures one. Any context may be current on the calling thread, and stays so.
    ///
    /// # Safety
    /// - The stream is one of this kernel's GPU.
    /// - The arguments mean what the kernel's parameters do; their number and sizes are checked.
    /// - What the kernel reads and writes through them is device memory that is valid until it has
    ///   run (in a graph: until the last replay has), and no other work touches meanwhile what it
    ///   writes.
    /// - The module stays loaded until then: this value, a clone, or its module is kept.
    pub unsafe fn launch(
        &self,
        stream: Stream<'_>,
        launch: Launch,
        arguments: impl Arguments,
    ) -> Result<(), GpuError> {
        let limit = self.0.dynamic_limit.load(Ordering::Relaxed);
        if launch.shared > limit {
            return Err(self.too_much_shared(launch.shared, limit, false));
        }
        arguments.with(|arguments| {
            let sizes = arguments.iter().map(|argument| argument.size);
            if !sizes.clone().eq(self.0.parameters.iter().copied()) {
                return Err(GpuError::Arguments {
                    kernel: self.0.name.clone(),
                    expected: self.0.parameters.clone(),
                    found: sizes.collect(),
                });
            }
            // SAFETY: the sizes are the parameters', and the caller vouches for the rest.
            unsafe {
                self.0
                    .function
                    .launch(&self.0.name, stream.raw(), launch, arguments)
            }
        })
    }

    fn too_much_shared(&self, asked: u32, limit: u32, is_hardware: bool) -> GpuError {
        GpuError::SharedMemory {
            kernel: self.0.name.clone(),
            asked,
            limit,
            is_hardware,
        }
    }
}
