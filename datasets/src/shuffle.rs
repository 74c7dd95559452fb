//! Shuffling more documents than fit in memory.
//!
//! The shards are cut into blocks of about [`Shuffle::block_tokens`] tokens, by where documents
//! begin. Each epoch puts the blocks of all shards into a random order and takes them in groups of
//! [`Shuffle::blocks`]; the documents of a group are shuffled and packed, and its rows are shuffled
//! again, since a long document fills many rows one after another. A group stands for itself: it
//! can be packed without those before it, so threads share the work and give the same rows.

use std::ops::Range;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cache::Manifest;

/// How widely documents are mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shuffle {
    /// Neighbours in the cache that stay near one another.
    pub block_tokens: u32,
    /// Blocks whose documents are mixed.
    pub blocks: u32,
}

impl Default for Shuffle {
    /// Groups of 2^24 tokens: 64 MiB of 32-bit ids.
    fn default() -> Self {
        Self {
            block_tokens: 1 << 18,
            blocks: 64,
        }
    }
}

/// The documents that begin in a run of a shard's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) shard: usize,
    pub(crate) starts: Range<u64>,
}

/// All blocks in the cache's order.
pub(crate) fn blocks(manifest: &Manifest, shuffle: Shuffle) -> Vec<Block> {
    let size = u64::from(shuffle.block_tokens);
    let of_shard = |(shard, tokens): (usize, u64)| {
        (0..tokens.div_ceil(size)).map(move |number| Block {
            shard,
            starts: number * size..(number + 1) * size,
        })
    };
    let shards = manifest.shards.iter().map(|shard| shard.tokens);
    shards.enumerate().flat_map(of_shard).collect()
}

/// The groups of an epoch.
pub(crate) fn groups(
    mut blocks: Vec<Block>,
    shuffle: Shuffle,
    seed: u64,
    epoch: u64,
) -> Vec<Vec<Block>> {
    blocks.shuffle(&mut rng(seed, epoch, u64::MAX));
    let group = |blocks: &[Block]| blocks.to_vec();
    blocks.chunks(shuffle.blocks as usize).map(group).collect()
}

/// The generator of a group's order, or of the blocks' order where `group` is the largest number:
/// no two share a sequence, as `seed + epoch` would.
pub(crate) fn rng(seed: u64, epoch: u64, group: u64) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    for number in [seed, epoch, group] {
        hash.update(number.to_le_bytes());
    }
    ChaCha8Rng::from_seed(hash.finalize().into())
}
