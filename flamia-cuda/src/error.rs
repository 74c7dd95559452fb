//! What can be wrong with a GPU, or with what it is asked for.

use crate::arch::{Arch, list};
use crate::launch::Launch;
use crate::version::{OLDEST, Version};

/// A GPU that cannot be used, or a call that the driver or this crate refuses.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GpuError {
    /// There is no libcuda.
    #[error(
        "there is no NVIDIA driver: libcuda.so.1 is not found\n  To mend it: install the driver, or \
         in a container start it with the GPUs passed in (`--gpus all`)"
    )]
    NoDriver,
    /// The driver does not load what CUDA 13 compiles.
    #[error(
        "the NVIDIA driver supports CUDA {found}, and {OLDEST} is needed\n  To mend it: install \
         driver 580 or newer"
    )]
    DriverTooOld {
        /// The newest CUDA that it supports.
        found: Version,
    },
    /// libcuda is there and does not start.
    #[error(
        "the NVIDIA driver does not start: {status}: {text}\n  To mend it: see that `nvidia-smi` \
         works; after an update of the driver, reboot or reload its modules"
    )]
    DriverUnusable {
        /// The driver's name of the failure.
        status: String,
        /// What that means.
        text: String,
    },
    /// A driver without a GPU.
    #[error(
        "the NVIDIA driver has no GPU\n  To mend it: see `nvidia-smi -L`, and whether \
         CUDA_VISIBLE_DEVICES hides them"
    )]
    NoGpu,
    /// Ordinals count from 0, in the order of CUDA_VISIBLE_DEVICES.
    #[error("there is no GPU {ordinal}; {count} can be seen, counted from 0")]
    NoSuchGpu {
        /// The ordinal that was asked for.
        ordinal: usize,
        /// How many GPUs there are.
        count: usize,
    },
    /// NVRTC has no code for it.
    #[error(
        "the {name} has compute capability {}.{}, for which nothing can be compiled; there is {}",
        .compute_capability.0, .compute_capability.1, list(&Arch::ALL)
    )]
    Unsupported {
        /// The GPU's name.
        name: String,
        /// Major and minor.
        compute_capability: (i32, i32),
    },
    /// A cubin of another chip.
    #[error("{source_name} was compiled for {cubin}, which does not run on the {gpu} ({gpu_arch})")]
    WrongArch {
        /// The source's name.
        source_name: &'static str,
        /// What it was compiled for.
        cubin: Arch,
        /// The GPU's name.
        gpu: String,
        /// What has to be compiled for it.
        gpu_arch: Arch,
    },
    /// No such kernel in the module.
    #[error(
        "{source_name} has no kernel {name:?}; it has {}. Kernels are looked up by the name in the \
         cubin, which `extern \"C\"` keeps as it is written",
        list(.available)
    )]
    NoKernel {
        /// The source's name.
        source_name: &'static str,
        /// The name that was asked for.
        name: String,
        /// The kernels that there are.
        available: Vec<String>,
    },
    /// Arguments that are not the kernel's parameters.
    #[error(
        "{kernel} takes {} parameters of [{}] bytes, and was given {} of [{}]",
        .expected.len(), list(.expected), .found.len(), list(.found)
    )]
    Arguments {
        /// The kernel.
        kernel: String,
        /// The sizes of its parameters, in bytes.
        expected: Vec<usize>,
        /// The sizes of the arguments.
        found: Vec<usize>,
    },
    /// More dynamic shared memory than the kernel may have.
    #[error(
        "{kernel} cannot have {asked} bytes of dynamic shared memory: {limit} is the limit{}",
        if *.is_hardware { " of this GPU" } else { ", which `Kernel::set_shared_limit` raises" }
    )]
    SharedMemory {
        /// The kernel.
        kernel: String,
        /// Bytes of one block.
        asked: u32,
        /// The most it may have.
        limit: u32,
        /// Whether no setting raises the limit.
        is_hardware: bool,
    },
    /// The driver refuses the launch.
    #[error("{kernel} cannot be launched with {launch}: {status}: {text}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What was asked for.
        launch: Launch,
        /// The driver's name of the failure.
        status: String,
        /// What that means.
        text: String,
    },
    /// Another call of the driver fails. Some failures are those of a kernel that ran before.
    #[error("the GPU's driver cannot {doing}: {status}: {text}")]
    Driver {
        /// What was tried.
        doing: &'static str,
        /// The driver's name of the failure.
        status: String,
        /// What that means.
        text: String,
    },
}
