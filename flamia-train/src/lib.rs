//! A Llama-3-style trainer on packed documents with low-bit attention.

pub mod settings;

#[cfg(feature = "torch")]
pub mod atomic;
#[cfg(feature = "torch")]
pub mod plot;
#[cfg(feature = "torch")]
pub mod summary;
#[cfg(feature = "torch")]
pub mod tensorboard;
#[cfg(feature = "torch")]
pub mod terminal;
