//! Rows made ahead by threads, in the order of the stream.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use super::{Position, RowStream, Walk};
use crate::options::DatasetError;
use crate::row::Row;

/// The rows of a [`RowStream`] out of threads. Each thread takes its turn like a rank among ranks,
/// so the rows do not depend on their number.
pub struct PrefetchedRows {
    /// By thread.
    lanes: Vec<Receiver<Made>>,
    threads: Vec<JoinHandle<()>>,
    next: usize,
    position: Position,
}

struct Made {
    row: Result<Row, DatasetError>,
    position: Position,
}

impl PrefetchedRows {
    pub(super) fn new(
        stream: &RowStream,
        threads: usize,
        ahead: usize,
    ) -> Result<Self, DatasetError> {
        let mut rows = Self {
            lanes: Vec::new(),
            threads: Vec::new(),
            next: 0,
            position: stream.position,
        };
        let count = threads.max(1);
        for lane in 0..count {
            let mut stream = RowStream {
                walk: Walk::at(stream.walk.dataset.clone(), stream.position)?,
                share: stream.share,
                lane,
                lanes: count,
                position: stream.position,
            };
            let (sender, receiver) = sync_channel(ahead.max(1));
            rows.lanes.push(receiver);
            rows.threads.push(std::thread::spawn(move || {
                loop {
                    let row = stream.next_row();
                    let position = stream.position;
                    let failed = row.is_err();
                    if sender.send(Made { row, position }).is_err() || failed {
                        break;
                    }
                }
            }));
        }
        Ok(rows)
    }

    /// As [`RowStream::position`], of the rows given so far.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }
}

impl Iterator for PrefetchedRows {
    type Item = Result<Row, DatasetError>;

    /// `None` only after an error.
    fn next(&mut self) -> Option<Result<Row, DatasetError>> {
        let Made { row, position } = self.lanes[self.next].recv().ok()?;
        self.next = (self.next + 1) % self.lanes.len();
        if row.is_ok() {
            self.position = position;
        }
        Some(row)
    }
}

impl Drop for PrefetchedRows {
    fn drop(&mut self) {
        // Threads end when nobody listens.
        self.lanes.clear();
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}
