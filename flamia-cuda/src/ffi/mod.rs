//! All the `unsafe` of this crate: calls into NVRTC and into the CUDA driver, and the values that
//! own what these hand out.

pub mod driver;
pub mod handles;
pub mod nvrtc;
