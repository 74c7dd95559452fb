//! Kernels for NVIDIA GPUs.

pub mod backward_fused;
pub mod backward_keys;
pub mod backward_queries;
pub mod call;
pub mod forward;
pub mod layout;
pub mod quantise;
pub mod retile;
pub mod tensor;

mod mask;
