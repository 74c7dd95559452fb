//! The CPU reference backend: every path, defined down to the order of its sums.
//!
//! A call falls into units, one per document and key/value head, that share nothing: what a unit
//! computes does not depend on where its document lies, on its neighbours or on the number of
//! threads. Inside a unit the tiles of the paper's kernels are walked in a fixed order.

mod backward;
mod block;
mod block_scaled;
mod call;
pub mod exponential;
mod f16;
mod forward;
mod gemm;
mod hopper;
mod low_bit;
mod operands;
mod real;
mod scheme;
mod simd;
mod softmax;
mod unit;

pub(crate) use call::Exactly;
pub use call::{Forward, Gradients, backward, forward};
pub use real::Real;
