//! Why the GPU was not timed.

use flamia_autograd::peers::PeerError;
use flamia_autograd::{CudaLoadError, StreamError};
use flamia_cuda::GpuError;
use flamia_kernels::AttentionError;
use flamia_kernels::cuda::call::CallError;
use flamia_sched::DocumentsError;
use tch::TchError;

use crate::attention::row::Masking;

/// Why the GPU was not timed.
#[derive(Debug, thiserror::Error)]
pub enum GpuBenchError {
    /// A machine without a GPU.
    #[error("there is no NVIDIA GPU to time attention on; `bench cpu` times it on the CPU")]
    NoGpu,
    /// torch cannot use the GPU.
    #[error(transparent)]
    Load(#[from] CudaLoadError),
    /// An output that is not what it should be.
    #[error(
        "{system} is wrong on {workload}, {mask}, and was not timed: the cosine of its {tensor} to \
         that of {against} is {cosine:.7}, and has to be {wanted} or more; report it with the output \
         of `nvidia-smi`, or leave {system} out with --system"
    )]
    Wrong {
        /// Whose output.
        system: String,
        /// On which workload.
        workload: &'static str,
        /// Under which mask.
        mask: Masking,
        /// `o`, `lse`, `dq`, `dk` or `dv`.
        tensor: &'static str,
        /// Whose output it was compared with.
        against: String,
        /// The cosine; NaN if there is a NaN.
        cosine: f64,
        /// What it has to be.
        wanted: f64,
    },
    /// Nobody has such a pass on such a workload.
    #[error(
        "none of the systems has what was asked for: name other ones with --system, --pass or \
         --workload, or see above why they were left out"
    )]
    Nobody,
    #[allow(missing_docs)]
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Call(#[from] CallError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Documents(#[from] DocumentsError),
    #[allow(missing_docs)]
    #[error(transparent)]
    Cpu(#[from] AttentionError),
    #[allow(missing_docs)]
    #[error("torch: {0}")]
    Torch(#[from] TchError),
}
