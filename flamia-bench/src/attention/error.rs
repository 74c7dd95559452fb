//! Why there are no times.

use std::path::PathBuf;

use flamia_train::atomic::WriteError;
use flamia_train::plot::PlotError;

use super::external::PeersError;

/// Why there are no times.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Times of another program that cannot be used.
    #[error(transparent)]
    Peers(#[from] PeersError),
    /// A file in a folder that is not there.
    #[error("cannot write {}: there is no folder {}; make it first", path.display(), folder.display())]
    NoFolder {
        /// The file.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// Rows that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A drawing that cannot be made or written.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// The program was built for what needs no torch.
    #[error(
        "this program was built without torch, which GPU attention is compared with: \
         `cargo xtask bench` builds it in, and so does cargo's --features flamia-bench/torch"
    )]
    NoTorch,
    /// The GPU, or torch on it, does not do what it has to.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Gpu(#[from] super::gpu::GpuBenchError),
}
