//! Several processes that train one model: data parallel, with the optimiser's state shared out.
//!
//! Every rank reads the rows of every global batch and computes its [`share`] of them. What a step
//! does is what one process would do: gradients are summed over ranks, each label weighing as much as
//! any other, while the backward goes on ([`gradients`]); each rank updates the part of the weights whose
//! moments it keeps ([`shards`]), and gets the others'. Rank 0 alone writes files, and a checkpoint is that of
//! one process: any number of ranks takes it up.
//!
//! [`World`] is what a launcher says (torchrun, SLURM, `cargo xtask train --nproc`), [`Team`] the ranks that have
//! met, and [`heart`] how they learn that one is gone.

pub mod flat;
pub mod gradients;
pub mod heart;
pub mod parallel;
pub mod shards;
pub mod share;
pub mod team;
mod trainer;
pub mod world;

pub use heart::{Heart, Verdict};
pub use parallel::DataParallel;
pub use team::{Team, TeamError};
pub(crate) use trainer::{is_operation, part};
pub use world::{World, WorldError};
