//! Which rows of a global batch go to which rank.
//!
//! Data-parallel ranks wait for the slowest one in every step. Rows are equally long, but a row of
//! one long document attends to far more keys than a row of many short ones, so the rows decide how
//! long the others wait. Every rank gets the same number of rows: gradients are averaged over
//! micro-batches, and shapes must not change from rank to rank.

use std::num::NonZero;

use crate::tiles::{key_tiles, query_tiles};
use crate::{Documents, Mask};

/// How long a rank takes for a packed row, forward and backward through the whole model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Time of a token: everything but attention.
    pub per_token: f64,
    /// Time of a visited pair of a query and a key tile ([`visited_blocks`]), for all layers and
    /// heads.
    pub per_block: f64,
}

impl StepTime {
    /// Microseconds of a Llama of 1.24 billion parameters (16 layers of 16 heads of 128) on an
    /// H200. A token: 65,400 tokens/s measured without attention. A block: 4.9 on one of 132
    /// multiprocessors (1.03 forward, 2.32 and 1.55 in the two backward kernels, measured on
    /// skeletons) for each of 256 heads.
    pub const LLAMA_1B_H200: Self = Self {
        per_token: 15.3,
        per_block: 9.5,
    };

    /// The time of a row.
    pub fn of(&self, row: &Documents, mask: Mask) -> f64 {
        self.per_token * row.total() as f64 + self.per_block * visited_blocks(row, mask) as f64
    }
}

/// Pairs of a query and a key tile that attention visits for one head of a row, the same pairs in
/// both passes.
pub fn visited_blocks(row: &Documents, mask: Mask) -> usize {
    row.iter()
        .flat_map(|document| {
            let len = document.len();
            query_tiles(len).map(move |tile| key_tiles(len, tile, mask).len())
        })
        .sum()
}

/// How rows come to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Balance {
    /// Row `i` to rank `i` modulo the ranks.
    AsTheyCome,
    /// Rows by decreasing time, to ranks forwards and backwards in turn.
    Snake,
    /// Rows by decreasing time, each to the rank with the least so far that has room.
    Greedy,
    /// [`Greedy`](Self::Greedy), then rows of the slowest rank swapped with others as long as that
    /// makes it faster.
    Refined,
}

impl Balance {
    /// All of them, from the least effort to the most.
    pub const ALL: [Self; 4] = [Self::AsTheyCome, Self::Snake, Self::Greedy, Self::Refined];
}

/// Rows that cannot be shared out equally.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{rows} rows cannot be shared equally among {ranks} ranks: every rank takes the same number, so \
     use {fewer} or {more} rows", fewer = rows / ranks * ranks, more = rows.next_multiple_of(*ranks)
)]
pub struct UnevenRows {
    /// Rows of the global batch.
    pub rows: usize,
    /// Ranks that share it.
    pub ranks: usize,
}

/// Who does which rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    /// For every rank the indices of its rows, ascending; as many for each.
    pub rows: Vec<Vec<usize>>,
    /// For every rank the time of its rows.
    pub loads: Vec<f64>,
}

impl Shares {
    /// The time of the slowest rank, which the step takes.
    pub fn longest(&self) -> f64 {
        self.loads.iter().copied().fold(0.0, f64::max)
    }

    /// The time of all ranks but for their number: what the step would take if loads were equal.
    pub fn mean(&self) -> f64 {
        self.loads.iter().sum::<f64>() / self.loads.len() as f64
    }

    /// The time of the slowest rank as a multiple of the mean; 1 if there is nothing to do.
    pub fn max_over_mean(&self) -> f64 {
        match self.mean() {
            0.0 => 1.0,
            mean => self.longest() / mean,
        }
    }
}

/// Shares rows out, given the time of each. The same rows are always shared out the same way.
///
/// # Errors
/// When the ranks cannot have equally many rows.
pub fn share(times: &[f64], ranks: NonZero<usize>, balance: Balance) -> Result<Shares, UnevenRows> {
    if !times.len().is_multiple_of(ranks.get()) {
        return Err(UnevenRows {
            rows: times.len(),
            ranks: ranks.get(),
        });
    }
    let mut shared = Sharing::new(times, ranks.get());
    match balance {
        Balance::AsTheyCome => {
            (0..times.len()).for_each(|row| shared.give(row, row % ranks.get()));
        }
        Balance::Snake => shared.snake(),
        Balance::Greedy => shared.greedy(),
        Balance::Refined => {
            shared.greedy();
            shared.refine();
        }
    }
    Ok(shared.done())
}

struct Sharing<'a> {
    times: &'a [f64],
    rows: Vec<Vec<usize>>,
}

impl<'a> Sharing<'a> {
    fn new(times: &'a [f64], ranks: usize) -> Self {
        Self {
            times,
            rows: vec![Vec::new(); ranks],
        }
    }

    fn give(&mut self, row: usize, rank: usize) {
        self.rows[rank].push(row);
    }

    fn load(&self, rank: usize) -> f64 {
        self.rows[rank].iter().map(|&row| self.times[row]).sum()
    }

    /// Rows by decreasing time, those that take equally long in order.
    fn longest_first(&self) -> Vec<usize> {
        let mut rows: Vec<_> = (0..self.times.len()).collect();
        rows.sort_by(|&a, &b| self.times[b].total_cmp(&self.times[a]));
        rows
    }

    fn snake(&mut self) {
        let ranks = self.rows.len();
        for (place, row) in self.longest_first().into_iter().enumerate() {
            let (round, rank) = (place / ranks, place % ranks);
            let rank = match round % 2 {
                0 => rank,
                _ => ranks - 1 - rank,
            };
            self.give(row, rank);
        }
    }

    fn greedy(&mut self) {
        let room = self.times.len() / self.rows.len();
        let mut loads = vec![0.0; self.rows.len()];
        for row in self.longest_first() {
            let least = (0..loads.len())
                .filter(|&rank| self.rows[rank].len() < room)
                .min_by(|&a, &b| f64::total_cmp(&loads[a], &loads[b]));
            let rank = least.expect("there is room for as many rows as there are");
            self.give(row, rank);
            loads[rank] += self.times[row];
        }
    }

    /// The slowest rank only ever gets faster, and nobody as slow as it was, so this ends.
    fn refine(&mut self) {
        while let Some(swap) = self.best_swap() {
            let [(from, a), (to, b)] = swap;
            (self.rows[from][a], self.rows[to][b]) = (self.rows[to][b], self.rows[from][a]);
        }
    }

    /// The swap of a row of the slowest rank that leaves the slower of the two fastest, as (rank,
    /// place) pairs, if any helps.
    fn best_swap(&self) -> Option<[(usize, usize); 2]> {
        let loads: Vec<_> = (0..self.rows.len()).map(|rank| self.load(rank)).collect();
        let slowest = (0..loads.len()).max_by(|&a, &b| loads[a].total_cmp(&loads[b]))?;
        // Gains that rounding alone could make would never end.
        let mut best = loads[slowest] * (1.0 - 1e-9);
        let mut swap = None;
        for other in (0..loads.len()).filter(|&rank| rank != slowest) {
            for (a, &given) in self.rows[slowest].iter().enumerate() {
                for (b, &taken) in self.rows[other].iter().enumerate() {
                    let moved = self.times[given] - self.times[taken];
                    let slower = (loads[slowest] - moved).max(loads[other] + moved);
                    if slower < best {
                        best = slower;
                        swap = Some([(slowest, a), (other, b)]);
                    }
                }
            }
        }
        swap
    }

    fn done(mut self) -> Shares {
        self.rows.iter_mut().for_each(|rows| rows.sort_unstable());
        let loads = (0..self.rows.len()).map(|rank| self.load(rank)).collect();
        Shares {
            rows: self.rows,
            loads,
        }
    }
}
