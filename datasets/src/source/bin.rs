//! Documents out of `.bin` files, by the token that begins each.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use super::{Content, Document, SourceError, Vocabulary};
use crate::bin_file::{BinError, Header, Width};

pub(crate) struct BinReader {
    file: BinTokens,
    /// Files that may go on with this one's last document.
    followers: std::vec::IntoIter<PathBuf>,
    bos: u32,
    /// What stands before the next document: its BOS was read already.
    in_document: bool,
}

impl BinReader {
    /// Opens a file behind its first `skip` documents. With `continues`, what stands before the
    /// first BOS belongs to the file before.
    pub(super) fn open(
        path: &Path,
        followers: Vec<PathBuf>,
        continues: bool,
        skip: u64,
        vocabulary: Vocabulary<'_>,
    ) -> Result<Self, SourceError> {
        let file = BinTokens::open(path)?;
        let wrong = |reason| SourceError::BinTokenizer {
            path: path.into(),
            tokenizer: vocabulary.tokenizer.into(),
            reason,
        };
        let width = Width::for_vocabulary(vocabulary.size);
        if file.header.width != width {
            return Err(wrong(format!(
                "ids have {} bytes, those of {} ids have {}",
                file.header.width.bytes(),
                vocabulary.size,
                width.bytes()
            )));
        }
        let mut reader = Self {
            file,
            followers: followers.into_iter(),
            bos: vocabulary.bos,
            in_document: false,
        };
        // Up to the first document.
        let mut before = 0;
        loop {
            match reader.file.next()? {
                Some(id) if id == reader.bos => break,
                Some(_) => before += 1,
                None if continues || before == 0 => return Ok(reader),
                None => {
                    return Err(wrong(format!("its BOS {} stands nowhere", vocabulary.bos)));
                }
            }
        }
        if before > 0 && !continues {
            return Err(wrong(format!(
                "{before} ids stand before the first document, which begins with {}; if they \
                 end a document of the file before, give that file too",
                vocabulary.bos
            )));
        }
        reader.in_document = true;
        for _ in 0..skip {
            reader.next()?;
        }
        Ok(reader)
    }

    pub(super) fn next(&mut self) -> Result<Option<Content>, SourceError> {
        if !self.in_document {
            return Ok(None);
        }
        let mut ids = Vec::new();
        while let Some(id) = self.file.next()? {
            if id == self.bos {
                return Ok(Some(Content::Document(Document::Tokens(ids))));
            }
            ids.push(id);
        }
        self.in_document = false;
        // The end is in the files that follow, up to the first BOS.
        for path in self.followers.by_ref() {
            let mut follower = BinTokens::open(&path)?;
            while let Some(id) = follower.next()? {
                if id == self.bos {
                    return Ok(Some(Content::Document(Document::Tokens(ids))));
                }
                ids.push(id);
            }
        }
        Ok(Some(Content::Document(Document::Tokens(ids))))
    }

    pub(super) fn share(&self) -> f64 {
        self.file.read as f64 / self.file.header.tokens.max(1) as f64
    }
}

/// The ids of one file.
struct BinTokens {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
    read: u64,
}

impl BinTokens {
    fn open(path: &Path) -> Result<Self, BinError> {
        let mut file = File::open(path).map_err(|source| BinError::Io {
            path: path.into(),
            source,
        })?;
        let header = Header::read(&mut file, path)?;
        Ok(Self {
            path: path.into(),
            file: BufReader::with_capacity(1 << 20, file),
            header,
            read: 0,
        })
    }

    fn next(&mut self) -> Result<Option<u32>, BinError> {
        if self.read == self.header.tokens {
            return Ok(None);
        }
        self.read += 1;
        let mut id = [0; 4];
        self.file
            .read_exact(&mut id[..self.header.width.bytes()])
            .map_err(|source| BinError::Io {
                path: self.path.clone(),
                source,
            })?;
        Ok(Some(u32::from_le_bytes(id)))
    }
}
