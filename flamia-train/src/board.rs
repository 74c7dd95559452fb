//! The run's TensorBoard curves. Logging may fail; training goes on.

use std::path::{Path, PathBuf};

use crate::curves::{Curve, read_curves};
use crate::tensorboard::{EventError, EventWriter};

/// Writes curves into the run's folder until that fails.
#[derive(Debug)]
pub struct Board {
    folder: PathBuf,
    writer: Option<EventWriter>,
    /// Why writing stopped, until it has been told.
    failure: Option<EventError>,
}

impl Board {
    /// Starts an event file in `folder`. `resume_at` is the first step that a resumed run writes
    /// again: TensorBoard then drops what was written for it and later ones.
    pub fn open(folder: &Path, resume_at: Option<u64>) -> Self {
        let open = || {
            let mut writer = EventWriter::create(folder)?;
            if let Some(step) = resume_at {
                writer.resume_at(step as i64)?;
            }
            Ok(writer)
        };
        let (writer, failure) = match open() {
            Ok(writer) => (Some(writer), None),
            Err(error) => (None, Some(error)),
        };
        Self {
            folder: folder.into(),
            writer,
            failure,
        }
    }

    /// A board that nothing is written to: another process writes the run's.
    pub fn closed(folder: &Path) -> Self {
        Self {
            folder: folder.into(),
            writer: None,
            failure: None,
        }
    }

    /// Adds a point to the curve `tag`.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) {
        self.attempt(|writer| writer.scalar(tag, step as i64, value));
    }

    /// Shows `markdown` under `tag` in the text tab.
    pub fn text(&mut self, tag: &str, step: u64, markdown: &str) {
        self.attempt(|writer| writer.text(tag, step as i64, markdown));
    }

    /// The failure that ended the writing, the first time it is asked for.
    pub fn take_failure(&mut self) -> Option<EventError> {
        self.failure.take()
    }

    /// The curves `tags` over all resumptions, up to `last_step`.
    ///
    /// # Errors
    /// [`EventError`] when an event file cannot be read.
    pub fn curves<const N: usize>(
        &self,
        tags: [&str; N],
        last_step: u64,
    ) -> Result<[Curve; N], EventError> {
        let mut curves = read_curves(&self.folder, last_step)?;
        Ok(tags.map(|tag| curves.remove(tag).unwrap_or_default()))
    }

    fn attempt(&mut self, write: impl FnOnce(&mut EventWriter) -> Result<(), EventError>) {
        if let Some(writer) = &mut self.writer
            && let Err(error) = write(writer)
        {
            self.writer = None;
            self.failure = Some(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::{TRAIN_LOSS, VAL_LOSS};

    #[test]
    fn a_folder_that_cannot_be_written_fails_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let mut board = Board::open(&file.join("below a file"), None);
        board.scalar(TRAIN_LOSS, 1, 2.0);
        assert!(board.take_failure().is_some());
        board.scalar(TRAIN_LOSS, 2, 2.0);
        assert!(board.take_failure().is_none());
    }

    #[test]
    fn curves_hold_each_step_once_as_it_was_last_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut killed = Board::open(folder.path(), None);
        for step in 1..=4 {
            killed.scalar(TRAIN_LOSS, step, step as f64);
        }
        let mut resumed = Board::open(folder.path(), Some(3));
        resumed.scalar(TRAIN_LOSS, 3, 30.0);
        resumed.scalar(VAL_LOSS, 3, 31.0);
        let [train, val] = resumed.curves([TRAIN_LOSS, VAL_LOSS], 3).unwrap();
        assert_eq!(train, [(1.0, 1.0), (2.0, 2.0), (3.0, 30.0)]);
        assert_eq!(val, [(3.0, 31.0)]);
    }
}
