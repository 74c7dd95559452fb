//! Reading event files back, every checksum verified.

use std::path::Path;

use protobuf::Message;
use tensorboard_proto::event::{Event, SessionLog_SessionStatus};
use tensorboard_rs::masked_crc32c::masked_crc32c;

use super::EventError;

/// Bytes of a record besides its event: length (8), its checksum (4), the event's checksum (4).
pub(super) const FRAME: usize = 16;

/// One point of a curve.
#[derive(Debug, Clone, PartialEq)]
pub struct ScalarEvent {
    /// The curve.
    pub tag: String,
    /// The step.
    pub step: i64,
    /// The value, in the single precision of the file.
    pub value: f32,
    /// When it was written, in seconds since 1970.
    pub wall_time: f64,
}

/// How an event file ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With a whole record.
    Whole,
    /// Inside the record that starts at this byte: its writer was killed, or is still at it.
    CutOff {
        /// Bytes from the file's start to the record's.
        offset: usize,
    },
}

/// What an event file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct EventLog {
    /// The points, in the order they were written.
    pub scalars: Vec<ScalarEvent>,
    /// Texts, as (tag, step, text).
    pub texts: Vec<(String, i64, String)>,
    /// The steps at which a resumed run said that it starts.
    pub starts: Vec<i64>,
    /// How the file ends.
    pub ending: Ending,
}

/// Reads the event file at `path`.
///
/// # Errors
/// [`EventError::Read`] if the file cannot be read, [`EventError::Damaged`] if a whole record's
/// checksum does not match or its event cannot be decoded.
pub fn read_events(path: &Path) -> Result<EventLog, EventError> {
    let bytes = std::fs::read(path).map_err(|source| EventError::Read {
        path: path.into(),
        source,
    })?;
    let mut log = EventLog {
        scalars: Vec::new(),
        texts: Vec::new(),
        starts: Vec::new(),
        ending: Ending::Whole,
    };
    let mut offset = 0;
    while offset < bytes.len() {
        let damaged = |what: String| EventError::Damaged {
            path: path.into(),
            offset,
            what,
        };
        let Some((event, length)) = record(&bytes[offset..]).map_err(damaged)? else {
            log.ending = Ending::CutOff { offset };
            break;
        };
        let event = Event::parse_from_bytes(event).map_err(|error| damaged(error.to_string()))?;
        log.add(&event);
        offset += length;
    }
    Ok(log)
}

/// The event at the start of `bytes` and its record's length; `None` if the record is cut off.
fn record(bytes: &[u8]) -> Result<Option<(&[u8], usize)>, String> {
    let Some((header, rest)) = bytes.split_first_chunk::<8>() else {
        return Ok(None);
    };
    let Some((checksum, rest)) = rest.split_first_chunk::<4>() else {
        return Ok(None);
    };
    verify("length", header, *checksum)?;
    let length = usize::try_from(u64::from_le_bytes(*header))
        .map_err(|_| "its length exceeds this machine's memory".to_string())?;
    let Some((event, rest)) = rest.split_at_checked(length) else {
        return Ok(None);
    };
    let Some((checksum, _)) = rest.split_first_chunk::<4>() else {
        return Ok(None);
    };
    verify("event", event, *checksum)?;
    Ok(Some((event, length + FRAME)))
}

fn verify(what: &str, bytes: &[u8], stored: [u8; 4]) -> Result<(), String> {
    let (stored, computed) = (u32::from_le_bytes(stored), masked_crc32c(bytes));
    if stored == computed {
        Ok(())
    } else {
        Err(format!(
            "the {what}'s checksum is {stored:#010x}, its bytes give {computed:#010x}"
        ))
    }
}

impl EventLog {
    fn add(&mut self, event: &Event) {
        let start = event.has_session_log()
            && event.get_session_log().get_status() == SessionLog_SessionStatus::START;
        if start {
            self.starts.push(event.get_step());
        }
        for value in event.get_summary().get_value() {
            let tag = value.get_tag().to_string();
            if value.has_simple_value() {
                self.scalars.push(ScalarEvent {
                    tag,
                    step: event.get_step(),
                    value: value.get_simple_value(),
                    wall_time: event.get_wall_time(),
                });
            } else if let [text] = value.get_tensor().get_string_val() {
                let text = String::from_utf8_lossy(text).into_owned();
                self.texts.push((tag, event.get_step(), text));
            }
        }
    }
}
