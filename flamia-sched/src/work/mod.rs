//! Work lists: what a work item is, what it costs, in which order items go out and to whom.

mod assign;
mod backward;
mod heads;
mod tiling;

pub use assign::{Acquisition, alternating};
pub use backward::{BackwardCall, BackwardLaunch, TileCtas, TileCtasRule};
pub use heads::HeadSections;
pub use tiling::{Pass, Tiling, WorkItem};
