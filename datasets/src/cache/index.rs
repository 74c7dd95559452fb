//! The `.idx` file beside each shard: where its documents begin, and what is known of their texts.
//!
//! 32 bytes of header (magic, version, documents, tokens of the shard), then 16 bytes a document,
//! all little-endian: the place of its first token `u32`, its text's bytes `u32`, and the first
//! eight bytes of its text's SHA-256, by which documents are split.

use std::ops::Range;

const MAGIC: &[u8; 8] = b"flamiaix";
const VERSION: u64 = 1;
pub(super) const HEADER_BYTES: usize = 32;
pub(super) const ENTRY_BYTES: usize = 16;

/// What the index knows of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where its BOS stands in the shard.
    pub(crate) start: u32,
    /// Bytes of its text.
    pub(crate) text_bytes: u32,
    /// Of its text.
    pub(crate) hash: u64,
}

impl Entry {
    pub(super) fn to_bytes(self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..4].copy_from_slice(&self.start.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.text_bytes.to_le_bytes());
        bytes[8..].copy_from_slice(&self.hash.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; ENTRY_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, hash @ ..] = bytes;
        Self {
            start: u32::from_le_bytes([a, b, c, d]),
            text_bytes: u32::from_le_bytes([e, f, g, h]),
            hash: u64::from_le_bytes(hash),
        }
    }
}

pub(super) fn header(documents: u64, tokens: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&documents.to_le_bytes());
    bytes[24..].copy_from_slice(&tokens.to_le_bytes());
    bytes
}

/// The entries of a shard's index file.
#[derive(Clone, Copy)]
pub(crate) struct Index<'a> {
    entries: &'a [[u8; ENTRY_BYTES]],
    tokens: u32,
}

impl<'a> Index<'a> {
    /// Takes the bytes of an index file for a shard of this many documents and tokens.
    pub(super) fn new(bytes: &'a [u8], documents: u64, tokens: u32) -> Result<Self, String> {
        let expected = header(documents, tokens.into());
        let entries = bytes
            .strip_prefix(&expected)
            .ok_or("its header does not belong to its shard")?;
        let index = Self::of_entries(entries, tokens);
        if index.len() as u64 != documents || entries.len() % ENTRY_BYTES != 0 {
            return Err(format!("it does not hold {documents} documents"));
        }
        Ok(index)
    }

    /// What follows the header of an index that [`Self::new`] took.
    pub(super) fn of_entries(entries: &'a [u8], tokens: u32) -> Self {
        let entries = entries.as_chunks().0;
        Self { entries, tokens }
    }

    pub(crate) fn len(self) -> usize {
        self.entries.len()
    }

    pub(crate) fn entry(self, document: usize) -> Entry {
        Entry::from_bytes(self.entries[document])
    }

    /// Where the document's tokens stand in the shard, BOS included. An index that went wrong gives
    /// a range within the shard all the same.
    pub(crate) fn span(self, document: usize) -> Range<usize> {
        let end = self
            .entries
            .get(document + 1)
            .map_or(self.tokens, |&next| Entry::from_bytes(next).start)
            .min(self.tokens);
        self.entry(document).start.min(end) as usize..end as usize
    }

    /// The documents that begin at these tokens of the shard.
    pub(crate) fn starting_in(self, tokens: Range<u64>) -> Range<usize> {
        let before = |limit: u64| {
            self.entries
                .partition_point(|&entry| u64::from(Entry::from_bytes(entry).start) < limit)
        };
        before(tokens.start)..before(tokens.end)
    }

    /// Starts must rise from 0, so that every token belongs to one document.
    pub(super) fn check(self) -> Result<(), String> {
        let mut expected = 0;
        for (document, &entry) in self.entries.iter().enumerate() {
            let Entry { start, .. } = Entry::from_bytes(entry);
            if start < expected || (document == 0 && start != 0) || start >= self.tokens {
                return Err(format!(
                    "document {document} is said to begin at token {start}"
                ));
            }
            expected = start + 1;
        }
        Ok(())
    }
}
