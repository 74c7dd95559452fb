//! TensorBoard event files, written so that nothing logged is ever lost.
//!
//! The crate `tensorboard-rs` gives the record format and the event types. Its own writer hands
//! events to a thread, from which a process that exits loses most, and names files so that two
//! writers of one second share one; [`EventWriter`] does neither: an event is in the file before
//! the call returns, and every writer has a file of its own.

mod read;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::{Message, RepeatedField};
use tensorboard_proto::event::{Event, SessionLog, SessionLog_SessionStatus};
use tensorboard_proto::summary::{
    Summary, Summary_Value, SummaryMetadata, SummaryMetadata_PluginData,
};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::{TensorShapeProto, TensorShapeProto_Dim};
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;

pub use read::{Ending, EventLog, ScalarEvent, read_events};

/// Why events could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// The file or its folder could not be written.
    #[error("cannot write TensorBoard events to {}: {source}; check the folder's permissions and the free space", path.display())]
    Write {
        /// The event file, or the folder in which it was to be made.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// An event could not be encoded.
    #[error("cannot encode a TensorBoard event: {0}")]
    Encode(protobuf::ProtobufError),
    /// The file could not be read.
    #[error("cannot read TensorBoard events from {}: {source}", path.display())]
    Read {
        /// The event file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A whole record is not what was written.
    #[error("{} is damaged in the record at byte {offset}: {what}", path.display())]
    Damaged {
        /// The event file.
        path: PathBuf,
        /// Where the record starts, in bytes from the file's start.
        offset: usize,
        /// What does not fit.
        what: String,
    },
}

/// A TensorBoard event file that is complete after every call.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
    /// Bytes of whole records. What a failed write leaves behind them is cut off again.
    length: u64,
}

impl EventWriter {
    /// Makes `folder` if need be and in it a new event file, different from any other writer's.
    ///
    /// # Errors
    /// [`EventError::Write`] if the folder or the file cannot be made or written.
    pub fn create(folder: &Path) -> Result<Self, EventError> {
        fs::create_dir_all(folder).map_err(|source| write_error(folder, source))?;
        let host = gethostname::gethostname()
            .to_string_lossy()
            .replace(['/', '\0'], "-");
        let stem = format!(
            "events.out.tfevents.{:010}.{host}.{}",
            now().as_secs(),
            std::process::id(),
        );
        let mut counter = 0;
        let (path, file) = loop {
            let path = folder.join(format!("{stem}.{counter}"));
            match File::create_new(&path) {
                Ok(file) => break (path, file),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => counter += 1,
                Err(source) => return Err(write_error(&path, source)),
            }
        };
        Self::start(path, file)
    }

    fn start(path: PathBuf, file: File) -> Result<Self, EventError> {
        let mut writer = Self {
            path,
            file,
            length: 0,
        };
        let mut version = Event::new();
        version.set_file_version("brain.Event:2".into());
        writer.write(version, 0)?;
        Ok(writer)
    }

    /// The event file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Says that a resumed run starts at `step`: TensorBoard then drops the points at and after
    /// it that the run, before it was interrupted, wrote in other files of the folder.
    ///
    /// # Errors
    /// [`EventError::Write`]; the file then ends with the last whole event.
    pub fn resume_at(&mut self, step: i64) -> Result<(), EventError> {
        let mut session = SessionLog::new();
        session.set_status(SessionLog_SessionStatus::START);
        let mut event = Event::new();
        event.set_session_log(session);
        self.write(event, step)
    }

    /// Adds one point to the curve `tag`. TensorBoard keeps values in single precision.
    ///
    /// # Errors
    /// [`EventError::Write`]; the file then ends with the last whole event.
    pub fn scalar(&mut self, tag: &str, step: i64, value: f64) -> Result<(), EventError> {
        let mut point = Summary_Value::new();
        point.set_tag(tag.into());
        point.set_simple_value(value as f32);
        self.write(summary(point), step)
    }

    /// Shows `markdown` under `tag` in TensorBoard's text tab.
    ///
    /// # Errors
    /// [`EventError::Write`]; the file then ends with the last whole event.
    pub fn text(&mut self, tag: &str, step: i64, markdown: &str) -> Result<(), EventError> {
        let mut plugin = SummaryMetadata_PluginData::new();
        plugin.set_plugin_name("text".into());
        let mut metadata = SummaryMetadata::new();
        metadata.set_plugin_data(plugin);
        let mut dim = TensorShapeProto_Dim::new();
        dim.set_size(1);
        let mut shape = TensorShapeProto::new();
        shape.set_dim(RepeatedField::from_vec(vec![dim]));
        let mut tensor = TensorProto::new();
        tensor.set_dtype(DataType::DT_STRING);
        tensor.set_tensor_shape(shape);
        tensor.set_string_val(RepeatedField::from_vec(vec![markdown.as_bytes().to_vec()]));

        let mut value = Summary_Value::new();
        value.set_tag(tag.into());
        value.set_metadata(metadata);
        value.set_tensor(tensor);
        self.write(summary(value), step)
    }

    fn write(&mut self, mut event: Event, step: i64) -> Result<(), EventError> {
        event.set_wall_time(now().as_secs_f64());
        event.set_step(step);
        let event = event.write_to_bytes().map_err(EventError::Encode)?;
        let mut record = Vec::with_capacity(event.len() + read::FRAME);
        let framed = RecordWriter::new(&mut record).write(&event);

        // One call to the system for the whole record: a kill falls before or after it.
        let written = framed.and_then(|()| self.file.write_all(&record));
        if let Err(source) = written {
            // If this fails too, readers take the remainder for the cut-off record that it is.
            let _ = self.file.set_len(self.length);
            let _ = io::Seek::seek(&mut self.file, io::SeekFrom::Start(self.length));
            return Err(write_error(&self.path, source));
        }
        self.length += record.len() as u64;
        Ok(())
    }
}

fn summary(value: Summary_Value) -> Event {
    let mut summary = Summary::new();
    summary.set_value(RepeatedField::from_vec(vec![value]));
    let mut event = Event::new();
    event.set_summary(summary);
    event
}

fn write_error(path: &Path, source: io::Error) -> EventError {
    EventError::Write {
        path: path.into(),
        source,
    }
}

/// The time since 1970; zero on a machine whose clock is set before it.
fn now() -> std::time::Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
