//! The simulation itself, which knows positions and their durations only.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::iter;

use super::{Assignment, Request};
use crate::work::{BackwardLaunch, alternating};

/// A position at its time.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub position: usize,
    pub start: f64,
    pub duration: f64,
}

impl Slot {
    pub fn end(&self) -> f64 {
        self.start + self.duration
    }
}

/// What each of `ctas` CTAs does.
pub fn lanes(durations: &[f64], assignment: Assignment, ctas: usize) -> Vec<Vec<Slot>> {
    let mut run = Run {
        durations,
        lanes: vec![Vec::new(); ctas],
    };
    let positions = durations.len();
    match assignment {
        Assignment::Strided => {
            for cta in 0..ctas {
                run.in_turn(cta, 0.0, (cta..positions).step_by(ctas));
            }
        }
        Assignment::Alternating => {
            for cta in 0..ctas {
                run.in_turn(cta, 0.0, alternating(ctas, cta, positions));
            }
        }
        Assignment::Dynamic { request, latency } => run.acquire(request, latency),
        Assignment::Launches(launch) => run.launch(launch),
    }
    run.lanes
}

struct Run<'a> {
    durations: &'a [f64],
    lanes: Vec<Vec<Slot>>,
}

impl Run<'_> {
    /// Adds a position to a CTA's lane.
    fn start(&mut self, cta: usize, position: usize, start: f64) -> Slot {
        let slot = Slot {
            position,
            start,
            duration: self.durations[position],
        };
        self.lanes[cta].push(slot);
        slot
    }

    /// Adds positions one after another, and returns when the last is done.
    fn in_turn(&mut self, cta: usize, from: f64, positions: impl Iterator<Item = usize>) -> f64 {
        positions.fold(from, |start, position| {
            self.start(cta, position, start).end()
        })
    }

    fn acquire(&mut self, request: Request, latency: f64) {
        let ctas = self.lanes.len();
        let asks_at = |slot: &Slot| match request {
            Request::AtStart => slot.start,
            Request::BeforeEnd(lead) => slot.start.max(slot.end() - lead),
        };
        let mut requests = Earliest::default();
        for cta in 0..ctas.min(self.durations.len()) {
            let slot = self.start(cta, cta, 0.0);
            requests.push(asks_at(&slot), cta);
        }
        for position in ctas..self.durations.len() {
            let (time, cta) = requests.pop();
            let free = self.lanes[cta].last().map_or(0.0, Slot::end);
            let slot = self.start(cta, position, free.max(time + latency));
            requests.push(asks_at(&slot), cta);
        }
    }

    fn launch(&mut self, launch: BackwardLaunch) {
        let positions = self.durations.len();
        let first = (0..launch.grid.min(positions)).map(iter::once);
        let done = self.dispatch(0.0, first);
        let second = (0..launch.overflow).map(|cta| launch.overflow_positions(cta, positions));
        self.dispatch(done, second);
    }

    /// Gives the CTAs of a grid, each with its positions, in order to whichever lane is free first.
    /// Returns when the last is done.
    fn dispatch<P>(&mut self, from: f64, grid: impl Iterator<Item = P>) -> f64
    where
        P: Iterator<Item = usize>,
    {
        let mut free = Earliest::default();
        for lane in 0..self.lanes.len() {
            free.push(from, lane);
        }
        grid.fold(from, |done, positions| {
            let (time, lane) = free.pop();
            let end = self.in_turn(lane, time, positions);
            free.push(end, lane);
            done.max(end)
        })
    }
}

/// CTAs by time, the lowest one of several at the same time first.
#[derive(Default)]
struct Earliest(BinaryHeap<Reverse<At>>);

impl Earliest {
    fn push(&mut self, time: f64, cta: usize) {
        self.0.push(Reverse(At { time, cta }));
    }

    /// # Panics
    /// If there is none: every lane is in here at all times.
    fn pop(&mut self) -> (f64, usize) {
        let Reverse(At { time, cta }) = self.0.pop().expect("a grid has at least one CTA");
        (time, cta)
    }
}

struct At {
    time: f64,
    cta: usize,
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_cta = || self.cta.cmp(&other.cta);
        self.time.total_cmp(&other.time).then_with(by_cta)
    }
}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for At {}
