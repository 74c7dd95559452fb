//! A Llama-3-style trainer on packed documents with low-bit attention.
//!
//! [`trainer`] is the loop, to be read first. Of the parts it uses,
//! [`model`], [`optim`], [`schedule`], [`step`] and [`evaluate`] know nothing of files, and
//! [`checkpoint`] and [`run_folder`] nothing of training; [`guard`] watches over the steps. [`capture`], [`leak_test`] and [`generate`] use a
//! checkpoint, [`distributed`] lets several processes train one model, and [`hugging_face`] takes models to and from other programs. Without the feature `torch` only
//! [`settings`] and [`commands`] are left, with the feature `report` [`atomic`] files, [`plot`]s and the [`machine`]'s
//! name, and with `compare` besides what [`report`]s on runs.

pub mod commands;
pub mod settings;

#[cfg(feature = "report")]
pub mod atomic;
#[cfg(feature = "torch")]
pub mod attention;
#[cfg(feature = "torch")]
pub mod batch;
#[cfg(feature = "torch")]
pub mod board;
#[cfg(feature = "torch")]
pub mod capture;
#[cfg(feature = "torch")]
pub mod checkpoint;
#[cfg(feature = "torch")]
pub mod cross_entropy;
#[cfg(feature = "compare")]
pub mod curves;
#[cfg(feature = "torch")]
pub mod data;
#[cfg(feature = "torch")]
pub mod device;
#[cfg(feature = "torch")]
pub mod distributed;
#[cfg(feature = "torch")]
pub mod error;
#[cfg(feature = "torch")]
pub mod evaluate;
#[cfg(feature = "torch")]
mod found;
#[cfg(feature = "torch")]
pub mod generate;
#[cfg(feature = "torch")]
pub mod guard;
#[cfg(feature = "torch")]
pub mod hugging_face;
#[cfg(feature = "torch")]
pub mod leak_test;
#[cfg(feature = "torch")]
pub mod loss;
#[cfg(feature = "report")]
pub mod machine;
#[cfg(feature = "torch")]
pub mod meter;
#[cfg(feature = "torch")]
pub mod model;
#[cfg(feature = "torch")]
pub mod optim;
#[cfg(feature = "torch")]
pub mod parts;
#[cfg(feature = "report")]
pub mod plot;
#[cfg(feature = "compare")]
pub mod report;
#[cfg(feature = "torch")]
pub mod resume;
#[cfg(feature = "torch")]
pub mod rng;
#[cfg(feature = "torch")]
pub mod run_folder;
#[cfg(feature = "torch")]
pub mod saved;
#[cfg(feature = "torch")]
pub mod schedule;
#[cfg(feature = "torch")]
mod setup;
#[cfg(feature = "torch")]
pub mod step;
#[cfg(feature = "torch")]
pub mod stop;
#[cfg(feature = "torch")]
pub mod summary;
#[cfg(feature = "compare")]
pub mod tensorboard;
#[cfg(feature = "torch")]
pub mod terminal;
#[cfg(feature = "torch")]
pub mod trainer;
