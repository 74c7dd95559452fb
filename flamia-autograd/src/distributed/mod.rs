//! torch's own engine for several processes, c10d: a [`Store`] where they meet, and [`Group`]s whose
//! ranks reduce, gather and broadcast tensors, with Gloo on CPUs and NCCL on GPUs.
//!
//! NCCL's part of torch is in libtorch_cuda, which this crate loads at run time: it is looked up when a
//! group is made, and one build runs with and without it.

mod error;
mod group;
mod store;

pub use error::DistributedError;
pub use group::{Backend, Group, Member, Work};
pub use store::{Store, StoreAddress};
