//! How fast each path of attention is, and how well its schedules keep a GPU busy.

pub mod attention;
pub mod cpu;
pub mod sched;
pub mod schedules;
