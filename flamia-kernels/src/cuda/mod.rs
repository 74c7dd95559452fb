//! Kernels for NVIDIA GPUs.

pub mod backward_fused;
pub mod backward_keys;
pub mod call;
pub mod forward;
pub mod layout;
pub mod quantise;
pub mod tensor;

mod parameters;
