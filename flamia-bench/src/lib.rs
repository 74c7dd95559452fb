//! How fast each path of attention is, and how well its schedules keep a GPU busy.

pub mod ablate;
pub mod attention;
mod bars;
pub mod cpu;
pub mod sched;
pub mod schedules;
