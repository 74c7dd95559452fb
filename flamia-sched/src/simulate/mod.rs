//! How long a schedule takes, by simulation: which CTA does what from when to when.
//!
//! A simulation knows what an item costs and nothing else: no clock that changes, no cache, no
//! memory that CTAs share. It tells schedules apart, not kernels.

mod cost;
mod policy;
mod run;
mod timeline;

use std::num::NonZero;

pub use cost::Cost;
pub use policy::{Assignment, Order, Policy, Request};
pub use timeline::{Span, Timeline};

use crate::Documents;
use crate::work::Tiling;

/// Runs the schedule on `ctas` CTAs that can be resident at the same time, one per multiprocessor
/// for kernels of this size.
pub fn simulate(
    documents: &Documents,
    tiling: &Tiling,
    policy: &Policy,
    cost: &Cost,
    ctas: NonZero<usize>,
) -> Timeline {
    let positions = policy.positions(tiling, documents);
    let durations: Vec<f64> = positions
        .iter()
        .map(|(item, _)| cost.of(tiling.cost(item)))
        .collect();
    let lanes = run::lanes(&durations, policy.assignment, ctas.get());
    Timeline::new(lanes, &positions)
}
