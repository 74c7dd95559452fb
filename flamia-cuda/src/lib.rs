//! The runtime below the CUDA kernels: it compiles embedded sources, loads and launches them.
//!
//! Kernels are real `.cu` files, embedded by the crates that own them. NVRTC compiles a [`Source`]
//! for one [`Arch`] with constants as macros into a [`Cubin`], once a machine; a [`Gpu`] loads it,
//! and a [`Kernel`] is launched on any library's [`Stream`]. Nothing in a launch waits for the GPU,
//! and all of it can be captured in a [`Graph`].
//!
//! Compilation needs no GPU, so that a CI without one can compile every kernel, see what it takes,
//! and refuse spills.
//!
//! This crate knows no tensor library and has no kernel of its own.
//!
//! ```no_run
//! use flamia_cuda::{Buffer, Gpu, Launch, Source};
//!
//! const SCALE: Source = Source {
//!     name: "scale.cu",
//!     text: r#"
//!         extern "C" __global__ void scale(float *x, unsigned n, float by) {
//!             unsigned i = blockIdx.x * THREADS + threadIdx.x;
//!             if (i < n) x[i] *= by;
//!         }
//!     "#,
//!     headers: &[],
//! };
//!
//! let gpu = Gpu::new(0)?;
//! let threads = 128;
//! let module = gpu.compile(&SCALE, &[("THREADS", threads.to_string())])?;
//! let scale = module.kernel("scale")?;
//!
//! let x = Buffer::from_slice(&gpu, &[1.0_f32, 2.0, 3.0])?;
//! let n = x.len() as u32;
//! let stream = gpu.context().default_stream();
//! let launch = Launch::linear(n.div_ceil(threads), threads);
//! // SAFETY: the arguments are the kernel's, `x` has `n` values, and is read back before it goes.
//! unsafe { scale.launch((&*stream).into(), launch, (x.pointer(), n, 2.0_f32))? };
//! assert_eq!(x.download()?, [2.0, 4.0, 6.0]);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

mod arch;
mod buffer;
mod cache;
mod compiler;
mod cubin;
mod error;
mod ffi;
mod find;
mod gpu;
mod graph;
mod launch;
mod log;
mod parameters;
mod ptx;
mod source;
mod version;

pub use arch::{Arch, UnknownArch};
pub use buffer::Buffer;
pub use compiler::{CompileError, Compiler};
pub use cubin::{Cubin, ResourceError};
pub use cudarc::driver::{CudaContext, CudaStream};
pub use error::GpuError;
pub use find::{NvrtcError, Refusal};
pub use gpu::{BuildError, Gpu, Kernel, Module};
pub use graph::{Graph, Timer};
pub use launch::{Arguments, Launch, Stream};
pub use log::KernelResources;
pub use parameters::PARAMETERS_HEADER;
pub use source::{Header, Program, Source};
pub use version::Version;

/// The environment variables that this crate reads, besides those that are not its own.
pub const ENVIRONMENT: [&str; 2] = [find::SETTING, cache::SETTING];
