//! Counters of what quantisation did to a call.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// Running totals, shared by the threads of a call and by as many calls as wanted.
#[derive(Debug, Default)]
pub struct Stats {
    ds_nonzero: AtomicU64,
    ds_flushed: AtomicU64,
    saturated: AtomicU64,
}

/// Totals of a [`Stats`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatsSnapshot {
    /// Entries of dS that were not zero before they were rounded (in the `hopper` profile each
    /// counts twice: it is rounded once for dQ and once for dK).
    pub ds_nonzero: u64,
    /// Those of them that were rounded to zero. Their share tracks training quality where a
    /// cosine does not (paper, section 3.3).
    pub ds_flushed: u64,
    /// Probabilities and dS entries that exceeded the largest code and were clamped. Zero by
    /// construction, but for ablations and for bit-level exponentials, whose error can lift the
    /// largest entry of a group just past it.
    pub saturated: u64,
}

impl StatsSnapshot {
    /// The share of nonzero dS entries that were rounded to zero; 0 when there were none.
    pub fn ds_flush_fraction(&self) -> f64 {
        if self.ds_nonzero == 0 {
            0.0
        } else {
            self.ds_flushed as f64 / self.ds_nonzero as f64
        }
    }
}

impl Stats {
    pub(crate) fn add(&self, counts: StatsSnapshot) {
        self.ds_nonzero
            .fetch_add(counts.ds_nonzero, Ordering::Relaxed);
        self.ds_flushed
            .fetch_add(counts.ds_flushed, Ordering::Relaxed);
        self.saturated
            .fetch_add(counts.saturated, Ordering::Relaxed);
    }

    /// Totals so far.
    pub fn snapshot(&self) -> StatsSnapshot {
        StatsSnapshot {
            ds_nonzero: self.ds_nonzero.load(Ordering::Relaxed),
            ds_flushed: self.ds_flushed.load(Ordering::Relaxed),
            saturated: self.saturated.load(Ordering::Relaxed),
        }
    }

    /// Totals since the last `take`, or since the start.
    pub fn take(&self) -> StatsSnapshot {
        StatsSnapshot {
            ds_nonzero: self.ds_nonzero.swap(0, Ordering::Relaxed),
            ds_flushed: self.ds_flushed.swap(0, Ordering::Relaxed),
            saturated: self.saturated.swap(0, Ordering::Relaxed),
        }
    }
}

impl AddAssign for StatsSnapshot {
    fn add_assign(&mut self, other: Self) {
        self.ds_nonzero += other.ds_nonzero;
        self.ds_flushed += other.ds_flushed;
        self.saturated += other.saturated;
    }
}
