//! Causally safe low-bit attention on packed documents.
//!
//! [`cpu`] is the reference backend: the `reference` path (exact attention) and the `mxfp8` path in
//! both profiles of the numerics, forward and backward, defined down to the order of every sum. It
//! takes plain buffers with shapes and strides and needs neither torch nor a GPU.
//!
//! ```
//! use flamia_kernels::{Mask, Options, Path, TensorView, cpu};
//! use flamia_sched::Documents;
//!
//! // Two documents of 3 and 2 tokens, 2 query heads that share 1 key/value head.
//! let documents = Documents::from_lengths(&[3, 2]).unwrap();
//! let (q, kv) = (vec![0.5f32; 5 * 2 * 64], vec![0.25f32; 5 * 64]);
//! let q = TensorView::packed("q", &q, 5, 2, 64).unwrap();
//! let kv = TensorView::packed("kv", &kv, 5, 1, 64).unwrap();
//!
//! let options = Options::new(Path::Mxfp8, Mask::Causal);
//! let forward = cpu::forward(&q, &kv, &kv, &documents, &options, None).unwrap();
//! assert_eq!(forward.o[0], 0.25);
//! ```

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

mod error;
mod options;
mod stats;
mod view;

pub use error::AttentionError;
pub use flamia_sched::Mask;
pub use options::{
    Ablation, Backend, BackwardForm, DkRounding, DqAccumulator, DsExponent, Exponential, Hadamard,
    MmaAccumulator, Normaliser, OperandScales, Options, Path, Polynomial, Profile, ValueScales,
};
pub use stats::{Stats, StatsSnapshot};
pub use view::{Element, TensorView};
