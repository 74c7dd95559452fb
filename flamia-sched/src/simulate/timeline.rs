//! What came out of a simulation.

use super::run::Slot;
use crate::work::WorkItem;

/// One item of one head on a CTA.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Place in the schedule.
    pub position: usize,
    /// The item at that place.
    pub item: WorkItem,
    /// The query head at that place.
    pub head: usize,
    /// When the CTA starts it.
    pub start: f64,
    /// When the CTA is done with it.
    pub end: f64,
}

/// What every CTA does and when. Times count from the launch, in the unit of the
/// [`Cost`](super::Cost).
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    lanes: Vec<Vec<Span>>,
    total: f64,
    longest: f64,
}

impl Timeline {
    pub(super) fn new(lanes: Vec<Vec<Slot>>, positions: &[(WorkItem, usize)]) -> Self {
        let slots = || lanes.iter().flatten();
        let total = slots().map(|slot| slot.duration).sum();
        let longest = slots().map(|slot| slot.duration).fold(0.0, f64::max);
        let span = |slot: Slot| {
            let (item, head) = positions[slot.position];
            Span {
                position: slot.position,
                item,
                head,
                start: slot.start,
                end: slot.end(),
            }
        };
        let lanes = lanes
            .into_iter()
            .map(|lane| lane.into_iter().map(span).collect())
            .collect();
        Self {
            lanes,
            total,
            longest,
        }
    }

    /// For every CTA what it does, in order of time.
    pub fn lanes(&self) -> &[Vec<Span>] {
        &self.lanes
    }

    /// When the last CTA is done.
    pub fn makespan(&self) -> f64 {
        self.lanes
            .iter()
            .filter_map(|lane| lane.last())
            .map(|span| span.end)
            .fold(0.0, f64::max)
    }

    /// The time of all items together.
    pub fn total(&self) -> f64 {
        self.total
    }

    /// The time of the longest item.
    pub fn longest(&self) -> f64 {
        self.longest
    }

    /// What no schedule can go below: all CTAs busy to the end, and the longest item on one of them.
    pub fn bound(&self) -> f64 {
        self.longest.max(self.total / self.lanes.len() as f64)
    }

    /// The makespan as a multiple of the bound; 1 if there is nothing to do.
    pub fn ratio(&self) -> f64 {
        match self.bound() {
            0.0 => 1.0,
            bound => self.makespan() / bound,
        }
    }

    /// Share of the CTAs' time up to the makespan in which they do no item; 0 if there is nothing to
    /// do.
    pub fn idle_share(&self) -> f64 {
        match self.makespan() * self.lanes.len() as f64 {
            0.0 => 0.0,
            available => 1.0 - self.total / available,
        }
    }
}
