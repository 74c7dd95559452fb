//! Probes that show what low-bit attention does.
//!
//! Each probe is a module with a measuring function, a row type whose documented fields are the keys
//! of the probe's JSON, and a struct of settings that is also its command line:
//!
//! * [`accuracy`]: cosine and relative error against float64, by path.
//! * [`leakage`]: what an earlier result knows of a later token, for any attention in a closure.
//! * [`flush`]: the share of dS, P and dO that a scheme rounds to zero.
//! * [`documents`]: what a loud document does to its neighbours in the packed row.
//! * [`exponent`]: the bit-level exponentials and the polynomial.
//!
//! With the feature `torch`, `torch` adds `capture`, which writes a checkpoint's activations to be
//! probed, `consistency`, which trains with the forward and backward passes at odds, and torch's own
//! attention to `leakage`. The feature `cuda`, which `torch` implies, adds to it the forward pass on a
//! Hopper GPU.

pub mod accuracy;
pub mod attention;
pub mod capture;
pub mod dense;
pub mod documents;
pub mod error;
pub mod exponent;
pub mod flush;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod input;
pub mod leakage;
pub mod metric;
pub mod numerics;
pub mod problem;
pub mod progress;
pub mod report;
#[cfg(feature = "torch")]
pub mod torch;

pub use error::ProbeError;
pub use problem::{Outputs, Problem, Tensor};
