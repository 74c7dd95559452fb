//! Read-only views of files: the crate's only `unsafe`.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::{Mmap, MmapOptions};

/// A part of a file in memory. Its pages count as this process's only while it lives.
#[derive(Debug)]
pub(crate) struct Window(Mmap);

impl Window {
    /// Maps `len >= 1` bytes from `offset`; the file must reach that far.
    pub(crate) fn open(path: &Path, offset: u64, len: usize) -> io::Result<Self> {
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        if offset.checked_add(len as u64).is_none_or(|end| end > bytes) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{bytes} bytes, but {len} are wanted from byte {offset}"),
            ));
        }
        // SAFETY: the view stays valid as long as nobody changes or shortens the file. This crate
        // never does: a cache's files are written under other names, get theirs by a rename when
        // they are whole, and are not opened for writing again. That nobody else does is the
        // promise asked of the user in docs/data.md.
        let map = unsafe { MmapOptions::new().offset(offset).len(len).map(&file)? };
        Ok(Self(map))
    }
}

impl Deref for Window {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
