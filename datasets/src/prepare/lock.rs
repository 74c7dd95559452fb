//! One process at a time prepares a folder. The system takes the lock back when a process ends,
//! however it ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

use crate::cache::{CacheError, LOCK};

/// Held as long as it lives.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub(super) fn take(dir: &Path, wait: bool) -> Result<Self, CacheError> {
        let path = dir.join(LOCK);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(CacheError::io("open", &path))?;
        if wait {
            file.lock().map_err(CacheError::io("lock", &path))?;
        } else {
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => CacheError::Busy { path: dir.into() },
                TryLockError::Error(error) => CacheError::io("lock", &path)(error),
            })?;
        }
        Ok(Self { _file: file })
    }
}
