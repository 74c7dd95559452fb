//! Writes one shard: tokens as they come, the header when their number is known.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::index::{self, Entry};
use super::{CacheError, ShardRecord};
use crate::atomic::Unfinished;
use crate::bin_file::{Header, Width};
use crate::hex;

/// A shard that is not whole yet. Dropped, it leaves nothing.
pub(crate) struct ShardWriter {
    dir: PathBuf,
    bin: BufWriter<Tokens>,
    width: Width,
    entries: Vec<u8>,
    record: ShardRecord,
}

/// The token file, named in errors.
struct Tokens(Unfinished);

impl Write for Tokens {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.file().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.file().flush()
    }
}

impl ShardWriter {
    /// Tokens that a shard can count: the header has 31 bits for them.
    pub(crate) const MAX_TOKENS: u64 = i32::MAX as u64;

    /// Begins shard number `number` of the cache in `dir`.
    pub(crate) fn create(dir: &Path, number: usize, width: Width) -> Result<Self, CacheError> {
        let name = format!("shard-{number:05}");
        let path = dir.join(format!("{name}.bin"));
        let create = || {
            let mut file = BufWriter::with_capacity(1 << 20, Tokens(Unfinished::create(&path)?));
            file.write_all(&[0; Header::BYTES])?;
            Ok(file)
        };
        Ok(Self {
            bin: create().map_err(CacheError::io("write", &path))?,
            dir: dir.into(),
            width,
            entries: Vec::new(),
            record: ShardRecord {
                name,
                documents: 0,
                tokens: 0,
                text_bytes: 0,
                largest_token: 0,
                bin_sha256: String::new(),
                idx_sha256: String::new(),
            },
        })
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.record.tokens
    }

    /// Adds a document of these ids behind BOS, which together leave the shard under
    /// [`Self::MAX_TOKENS`]. No id is beyond the width.
    pub(crate) fn push(
        &mut self,
        bos: u32,
        ids: &[u32],
        text_bytes: u32,
        hash: u64,
    ) -> Result<(), CacheError> {
        let entry = Entry {
            start: self.record.tokens as u32,
            text_bytes,
            hash,
        };
        self.entries.extend(entry.to_bytes());
        let all = || [bos].into_iter().chain(ids.iter().copied());
        let mut write = || match self.width {
            Width::U16 => all().try_for_each(|id| self.bin.write_all(&(id as u16).to_le_bytes())),
            Width::U32 => all().try_for_each(|id| self.bin.write_all(&id.to_le_bytes())),
        };
        write().map_err(CacheError::io("write", &self.dir.join(&self.record.name)))?;
        self.record.documents += 1;
        self.record.tokens += 1 + ids.len() as u64;
        self.record.text_bytes += u64::from(text_bytes);
        self.record.largest_token = all().fold(self.record.largest_token, u32::max);
        Ok(())
    }

    /// Gives both files their names.
    pub(crate) fn finish(self) -> Result<ShardRecord, CacheError> {
        let Self {
            dir,
            bin,
            width,
            entries,
            mut record,
        } = self;
        let path = |extension| dir.join(format!("{}.{extension}", record.name));
        let (bin_path, idx_path) = (path("bin"), path("idx"));
        let header = Header {
            width,
            tokens: record.tokens,
        };
        let finish_bin = || {
            let Tokens(mut bin) = bin.into_inner().map_err(io::IntoInnerError::into_error)?;
            bin.file().seek(SeekFrom::Start(0))?;
            bin.file().write_all(&header.to_bytes())?;
            bin.file().seek(SeekFrom::Start(0))?;
            let digest = digest(bin.file())?;
            bin.finish()?;
            Ok(digest)
        };
        let finish_idx = || {
            let mut idx = Unfinished::create(&idx_path)?;
            let header = index::header(record.documents, record.tokens);
            idx.file().write_all(&header)?;
            idx.file().write_all(&entries)?;
            idx.finish()?;
            let digest = Sha256::new().chain_update(header).chain_update(&entries);
            Ok(hex(&digest.finalize()))
        };
        let idx_sha256 = finish_idx().map_err(CacheError::io("write", &idx_path))?;
        let bin_sha256 = finish_bin().map_err(CacheError::io("write", &bin_path))?;
        (record.bin_sha256, record.idx_sha256) = (bin_sha256, idx_sha256);
        Ok(record)
    }
}

/// SHA-256 of the rest of a file, in hexadecimal.
pub(crate) fn digest(file: &mut File) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hex(&hash.finalize())),
            Ok(read) => hash.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
