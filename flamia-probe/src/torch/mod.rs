//! Probes that need torch.

pub mod capture;
pub mod consistency;
