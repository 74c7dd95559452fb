//! Reads every byte of a cache and compares it with the manifest.

use rayon::prelude::*;

use super::writer::digest;
use super::{Cache, CacheError, ShardRecord, open};
use crate::bin_file::Ids;

/// What came of checking a shard.
#[derive(Debug)]
pub struct ShardCheck {
    /// The shard.
    pub name: String,
    /// What is wrong with it, if anything is.
    pub result: Result<(), CacheError>,
}

impl Cache {
    /// Checks every shard: sizes, headers, the SHA-256 of both files, that documents begin with
    /// BOS and follow one another without gaps. One that is damaged does not keep the others from
    /// being checked. Changes nothing.
    ///
    /// # Errors
    /// [`CacheError`] if the manifest itself cannot be read; the shards' are in the result.
    pub fn check(dir: &std::path::Path) -> Result<Vec<ShardCheck>, CacheError> {
        // Not `open`, which stops at the first shard of a wrong size.
        let cache = Self::open_unchecked(dir)?;
        let shards = cache.manifest.shards.par_iter().enumerate();
        let check = |(number, shard): (usize, &ShardRecord)| ShardCheck {
            name: shard.name.clone(),
            result: cache.check_shard(number, shard),
        };
        Ok(shards.map(check).collect())
    }

    fn check_shard(&self, number: usize, shard: &ShardRecord) -> Result<(), CacheError> {
        self.check_sizes(shard)?;
        let files = [
            (self.bin_path(shard), &shard.bin_sha256),
            (self.index_path(shard), &shard.idx_sha256),
        ];
        for (path, expected) in files {
            let found = digest(&mut open(&path)?).map_err(CacheError::io("read", &path))?;
            if found != *expected {
                return Err(CacheError::Damaged {
                    path,
                    reason: format!("its SHA-256 is {found}, the manifest says {expected}"),
                });
            }
        }
        let index = self.index(number)?;
        let damaged = |reason| CacheError::Damaged {
            path: self.index_path(shard),
            reason,
        };
        index.get().check().map_err(damaged)?;
        let ids = self.tokens(number, 0..shard.tokens)?;
        let is_bos = |place: usize| {
            let bos = self.manifest.tokenizer.bos;
            match ids.get() {
                Ids::U16(ids) => u32::from(u16::from_le_bytes(ids[place])) == bos,
                Ids::U32(ids) => u32::from_le_bytes(ids[place]) == bos,
            }
        };
        let index = index.get();
        let wrong = (0..index.len()).find(|&document| !is_bos(index.span(document).start));
        wrong.map_or(Ok(()), |document| {
            Err(damaged(format!(
                "document {document} does not begin with BOS"
            )))
        })
    }
}
