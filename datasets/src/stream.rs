//! Endless, resumable streams of training rows, shared among ranks and threads.

mod prefetch;

use std::sync::Arc;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

pub use prefetch::PrefetchedRows;

use crate::group::{Group, RowPart};
use crate::loader::{Dataset, Inner};
use crate::options::DatasetError;
use crate::row::Row;
use crate::shuffle::Block;

/// Where a stream of training rows stands: the next row of all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Position {
    /// Passes over the training documents completed before.
    pub epoch: u64,
    /// Rows of this epoch given before, to whatever rank.
    pub row: u64,
}

/// Which rows are a rank's: of every `ranks` rows, number `rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Counted from 0.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

impl Default for Share {
    /// All rows.
    fn default() -> Self {
        Self { rank: 0, ranks: 1 }
    }
}

impl Share {
    fn check(self) -> Result<(), DatasetError> {
        if self.rank < self.ranks {
            return Ok(());
        }
        Err(DatasetError::Option {
            name: "rank",
            value: format!("{} of {}", self.rank, self.ranks),
            expected: "counted from 0 and less than the number of ranks",
        })
    }
}

/// Walks over the rows of all ranks, epoch after epoch, without reading their tokens.
struct Walk {
    dataset: Dataset,
    /// Of the next row.
    position: Position,
    groups: Vec<Vec<Block>>,
    next_group: usize,
    group: Option<Arc<Group>>,
    /// Rows of the group passed.
    passed: usize,
}

/// A row that the walk passed, to be read if it is wanted.
struct Passed {
    group: Arc<Group>,
    row: usize,
}

impl Walk {
    fn at(dataset: Dataset, position: Position) -> Result<Self, DatasetError> {
        let Position { epoch, row } = position;
        let groups = dataset.0.groups(epoch);
        let (next_group, passed) = find(&dataset.0, &groups, epoch, row)?;
        let mut walk = Self {
            dataset,
            position,
            groups,
            next_group,
            group: None,
            passed: 0,
        };
        if next_group < walk.groups.len() {
            walk.load()?;
            walk.passed = passed;
        }
        Ok(walk)
    }

    /// Takes the next group up.
    fn load(&mut self) -> Result<(), DatasetError> {
        // The one before goes first: two are never in memory for one walk.
        self.group = None;
        let (number, epoch) = (self.next_group, self.position.epoch);
        let group = Group::load(&self.dataset.0, &self.groups[number], epoch, number as u64)?;
        self.group = Some(Arc::new(group));
        self.next_group += 1;
        self.passed = 0;
        Ok(())
    }

    /// The next row of this epoch; `None` at its end.
    fn next_in_epoch(&mut self) -> Result<Option<Passed>, DatasetError> {
        loop {
            if let Some(group) = &self.group
                && self.passed < group.len()
            {
                let row = self.passed;
                self.passed += 1;
                self.position.row += 1;
                let group = Arc::clone(group);
                return Ok(Some(Passed { group, row }));
            }
            if self.next_group == self.groups.len() {
                return Ok(None);
            }
            self.load()?;
        }
    }

    /// The next row. There is one: an open dataset has training documents.
    fn next(&mut self) -> Result<Passed, DatasetError> {
        loop {
            if let Some(passed) = self.next_in_epoch()? {
                return Ok(passed);
            }
            let epoch = self.position.epoch + 1;
            self.position = Position { epoch, row: 0 };
            self.groups = self.dataset.0.groups(epoch);
            self.next_group = 0;
        }
    }
}

/// The group in which row `row` of an epoch is, and the rows of the group before it. Groups are
/// packed to be counted, all threads at it.
fn find(
    inner: &Inner,
    groups: &[Vec<Block>],
    epoch: u64,
    row: u64,
) -> Result<(usize, usize), DatasetError> {
    let at_once = 4 * rayon::current_num_threads();
    let mut before = 0;
    let mut number = 0;
    while number < groups.len() && before < row {
        let some = &groups[number..groups.len().min(number + at_once)];
        let count = |(index, blocks): (usize, &Vec<Block>)| {
            let group = Group::plan(inner, blocks, epoch, (number + index) as u64)?;
            Ok(group.len() as u64)
        };
        let counts: Result<Vec<u64>, DatasetError> =
            some.par_iter().enumerate().map(count).collect();
        for count in counts? {
            if before + count > row {
                return Ok((number, (row - before) as usize));
            }
            before += count;
            number += 1;
        }
    }
    if before < row {
        return Err(DatasetError::PositionBeyondEpoch {
            epoch,
            row,
            rows: before,
        });
    }
    Ok((number, 0))
}

/// The row at a position, and where its parts come from.
pub(crate) fn row_with_parts(
    dataset: Dataset,
    position: Position,
) -> Result<(Row, Vec<RowPart>), DatasetError> {
    let mut walk = Walk::at(dataset, position)?;
    let Passed { group, row } = walk.next()?;
    let inner = &walk.dataset.0;
    Ok((group.shuffled_row(inner, row)?, group.parts(inner, row)))
}

/// One rank's endless training rows, each epoch in its own shuffled order.
pub struct RowStream {
    walk: Walk,
    share: Share,
    /// Which of the rank's rows a thread gives: of every `lanes`, number `lane`.
    lane: usize,
    lanes: usize,
    position: Position,
}

impl RowStream {
    pub(crate) fn new(
        dataset: Dataset,
        position: Position,
        share: Share,
    ) -> Result<Self, DatasetError> {
        share.check()?;
        Ok(Self {
            walk: Walk::at(dataset, position)?,
            share,
            lane: 0,
            lanes: 1,
            position,
        })
    }

    /// Where all ranks stand once each has given as many rows as this one: save it, and
    /// [`Dataset::stream_of`] goes on with the next row, for as many ranks as then take part.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// The same rows, made by `threads` threads up to `ahead` rows each before they are asked for.
    ///
    /// # Errors
    /// [`DatasetError::Cache`].
    pub fn prefetch(self, threads: usize, ahead: usize) -> Result<PrefetchedRows, DatasetError> {
        PrefetchedRows::new(&self, threads, ahead)
    }

    fn next_row(&mut self) -> Result<Row, DatasetError> {
        let Share { rank, ranks } = self.share;
        let mut mine = None;
        for lane in 0..self.lanes {
            for taker in 0..ranks {
                let passed = self.walk.next()?;
                if lane == self.lane && taker == rank {
                    mine = Some(passed);
                }
            }
            if lane == self.lane {
                self.position = self.walk.position;
            }
        }
        match mine {
            Some(Passed { group, row }) => group.shuffled_row(&self.walk.dataset.0, row),
            None => unreachable!("a checked rank is one of the ranks"),
        }
    }
}

impl Iterator for RowStream {
    type Item = Result<Row, DatasetError>;

    /// Never `None`.
    fn next(&mut self) -> Option<Result<Row, DatasetError>> {
        Some(self.next_row())
    }
}

/// One rank's rows of one epoch; as many as every other rank's.
pub struct EpochRows {
    walk: Walk,
    share: Share,
}

impl EpochRows {
    pub(crate) fn new(dataset: Dataset, epoch: u64, share: Share) -> Result<Self, DatasetError> {
        share.check()?;
        let walk = Walk::at(dataset, Position { epoch, row: 0 })?;
        Ok(Self { walk, share })
    }

    fn next_row(&mut self) -> Result<Option<Row>, DatasetError> {
        let (mut mine, mut some) = (None, false);
        for taker in 0..self.share.ranks {
            let passed = self.walk.next_in_epoch()?;
            some |= passed.is_some();
            if taker == self.share.rank {
                mine = passed;
            }
        }
        let inner = &self.walk.dataset.0;
        match mine {
            Some(Passed { group, row }) => group.shuffled_row(inner, row).map(Some),
            None if some => inner.assemble([].into_iter()).map(Some),
            None => Ok(None),
        }
    }
}

impl Iterator for EpochRows {
    type Item = Result<Row, DatasetError>;

    fn next(&mut self) -> Option<Result<Row, DatasetError>> {
        self.next_row().transpose()
    }
}
