//! How fast each path of attention is.

pub mod cpu;
pub mod schedules;
