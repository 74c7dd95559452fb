//! Probes that need torch.

pub mod capture;
pub mod consistency;
mod sdpa;

pub use sdpa::schemes;
