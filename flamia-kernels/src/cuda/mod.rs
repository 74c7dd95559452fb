//! Kernels for NVIDIA GPUs.

pub mod layout;
