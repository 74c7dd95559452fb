//! Where quantised operands lie in device memory. `layout.cuh` beside this file is the same for
//! kernels.
//!
//! Every document starts at a multiple of 32 rows of the scratch, and no block holds rows of two. A
//! kernel reads and writes whole blocks, and none but those that hold rows of the document it works on:
//! tiles that reach past a document's last block are copied up to there, and what would come after is
//! masked. So nothing lies behind the last document, and what no document has is never written.
//!
//! Rows of scratch are called *slots*. Images and tables are head-major: all slots of the first head,
//! then those of the next.

use flamia_sched::{BLOCK, Documents};

/// Codes of the unit that swizzles move.
const CHUNK: usize = 16;

/// A head dimension that there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadDim {
    /// 64.
    D64,
    /// 128.
    D128,
}

impl HeadDim {
    /// All of them, as numbers.
    pub const SUPPORTED: &[usize] = &[64, 128];

    /// The number.
    pub const fn get(self) -> usize {
        match self {
            HeadDim::D64 => 64,
            HeadDim::D128 => 128,
        }
    }
}

impl TryFrom<usize> for HeadDim {
    type Error = LayoutError;

    fn try_from(head_dim: usize) -> Result<Self, LayoutError> {
        match head_dim {
            64 => Ok(HeadDim::D64),
            128 => Ok(HeadDim::D128),
            _ => Err(LayoutError::HeadDim { head_dim }),
        }
    }
}

/// Why a tensor has no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No kernel for this head dimension.
    #[error(
        "head dimension {head_dim} is not supported on the GPU: use one of {:?}",
        HeadDim::SUPPORTED
    )]
    HeadDim {
        /// Asked for.
        head_dim: usize,
    },
    /// More slots than kernels count.
    #[error(
        "{tokens} rows in {documents} documents need {slots} padded rows, more than 32 bits count \
         ({max}): split the packed row", max = i32::MAX
    )]
    TooManySlots {
        /// Rows of the packed row.
        tokens: usize,
        /// Documents, empty ones included.
        documents: usize,
        /// What they need, saturated at `usize::MAX`.
        slots: usize,
    },
    /// More blocks than a grid has CTAs.
    #[error(
        "{heads} heads of {blocks} token blocks are more than one launch takes ({max}): split the \
         packed row", max = i32::MAX
    )]
    TooManyBlocks {
        /// Heads of the tensor.
        heads: usize,
        /// Token blocks of one head.
        blocks: usize,
    },
}

/// The slot of a document's first row, from its first row and its number.
///
/// Empty documents count, so that no scan over the lengths before is needed: each document gets one
/// block more than those before it can fill.
pub const fn padded_start(start: usize, document: usize) -> usize {
    start / BLOCK * BLOCK + BLOCK * document
}

/// The order of 16 tokens in a chunk of the transposed image, pi: byte 4c + 2a + b is token
/// 8a + 2c + b. The four scores of a thread's accumulator rows are then the four bytes of its next A
/// fragment.
pub const fn pi_token(byte: usize) -> usize {
    8 * ((byte >> 1) & 1) + 2 * (byte >> 2) + (byte & 1)
}

/// The inverse of [`pi_token`].
pub const fn pi_byte(token: usize) -> usize {
    4 * ((token >> 1) & 3) + 2 * (token >> 3) + (token & 1)
}

/// The images and tables of a packed tensor `[tokens, heads, head_dim]`. Depends on shapes alone,
/// never on where documents end, so that a captured graph serves any documents of as many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PaddedLayout {
    heads: usize,
    slots: usize,
    head_dim: HeadDim,
}

impl PaddedLayout {
    /// For a packed row of `tokens` rows in `documents` documents, empty ones included.
    ///
    /// # Errors
    /// There are more slots, or more blocks of all heads, than an `i32` counts.
    pub fn new(
        tokens: usize,
        documents: usize,
        heads: usize,
        head_dim: HeadDim,
    ) -> Result<Self, LayoutError> {
        let slots = documents
            .saturating_mul(BLOCK)
            .saturating_add(tokens)
            .saturating_add(BLOCK);
        if i32::try_from(slots).is_err() {
            return Err(LayoutError::TooManySlots {
                tokens,
                documents,
                slots,
            });
        }
        let slots = tokens.next_multiple_of(BLOCK) + BLOCK * documents;
        let blocks = slots / BLOCK;
        if i32::try_from(heads.saturating_mul(blocks)).is_err() {
            return Err(LayoutError::TooManyBlocks { heads, blocks });
        }
        Ok(Self {
            heads,
            slots,
            head_dim,
        })
    }

    /// [`PaddedLayout::new`] for these documents.
    ///
    /// # Errors
    /// As [`PaddedLayout::new`].
    pub fn of(documents: &Documents, heads: usize, head_dim: HeadDim) -> Result<Self, LayoutError> {
        Self::new(documents.total(), documents.len(), heads, head_dim)
    }

    /// Heads of the tensor.
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Slots of one head; a multiple of 32.
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// Token blocks of one head.
    pub const fn blocks(&self) -> usize {
        self.slots / BLOCK
    }

    #[allow(missing_docs)]
    pub const fn head_dim(&self) -> HeadDim {
        self.head_dim
    }

    /// Bytes of a row image, and of a transposed one: a code per slot and feature.
    pub const fn image_bytes(&self) -> usize {
        self.heads * self.slots * self.head_dim.get()
    }

    /// Bytes of a table `[heads, blocks]` of `f32`, such as the scales.
    pub const fn block_table_bytes(&self) -> usize {
        self.heads * self.blocks() * size_of::<f32>()
    }

    /// Bytes of a table `[heads, slots]` of `f32`, such as D.
    pub const fn slot_table_bytes(&self) -> usize {
        self.heads * self.slots * size_of::<f32>()
    }

    /// The byte of an element in the row image: a row of codes per slot, in the order that wgmma
    /// reads under the swizzle of that row length.
    pub const fn row_byte(&self, head: usize, slot: usize, dim: usize) -> usize {
        let phase = match self.head_dim {
            HeadDim::D128 => slot % 8,
            HeadDim::D64 => (slot / 2) % 4,
        };
        let row = (head * self.slots + slot) * self.head_dim.get();
        row + ((dim / CHUNK) ^ phase) * CHUNK + dim % CHUNK
    }

    /// The byte of an element in the transposed image: for each block, a row of its 32 tokens per
    /// feature, under the 32-byte swizzle, tokens in the order of [`pi_token`].
    pub const fn transposed_byte(&self, head: usize, slot: usize, dim: usize) -> usize {
        let token = slot % BLOCK;
        let block = (head * self.slots + slot - token) * self.head_dim.get();
        let chunk = (token / CHUNK) ^ ((dim / 4) % 2);
        block + dim * BLOCK + chunk * CHUNK + pi_byte(token % CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Where shared memory has a byte of a plain image under a swizzle of 16 << `bits` bytes: the
    /// number of the chunk is flipped with as many bits of the 128-byte line's number.
    fn swizzled(byte: usize, bits: u32) -> usize {
        byte ^ ((byte >> 3) & (((1 << bits) - 1) << 4))
    }

    #[test]
    fn tokens_of_a_chunk_are_those_of_an_accumulator() {
        let order: Vec<_> = (0..16).map(pi_token).collect();
        assert_eq!(
            order,
            [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
        );
        assert!((0..16).all(|token| pi_token(pi_byte(token)) == token));
    }

    #[test]
    fn row_images_are_swizzled_as_the_hardware_does() {
        for (head_dim, bits) in [(HeadDim::D128, 3), (HeadDim::D64, 2)] {
            let layout = PaddedLayout::new(100, 3, 2, head_dim).unwrap();
            let dims = head_dim.get();
            for head in 0..2 {
                for slot in 0..layout.slots() {
                    for dim in 0..dims {
                        let plain = (head * layout.slots() + slot) * dims + dim;
                        assert_eq!(layout.row_byte(head, slot, dim), swizzled(plain, bits));
                    }
                }
            }
        }
    }

    #[test]
    fn transposed_images_are_swizzled_as_the_hardware_does() {
        for head_dim in [HeadDim::D128, HeadDim::D64] {
            let layout = PaddedLayout::new(100, 3, 2, head_dim).unwrap();
            let dims = head_dim.get();
            let mut plain = 0;
            for head in 0..2 {
                for block in 0..layout.blocks() {
                    for dim in 0..dims {
                        for byte in 0..BLOCK {
                            let token = byte / CHUNK * CHUNK + pi_token(byte % CHUNK);
                            let place = layout.transposed_byte(head, block * BLOCK + token, dim);
                            assert_eq!(place, swizzled(plain, 1));
                            plain += 1;
                        }
                    }
                }
            }
            assert_eq!(plain, layout.image_bytes());
        }
    }

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        assert_eq!(HeadDim::try_from(128), Ok(HeadDim::D128));
        let error = HeadDim::try_from(96).unwrap_err().to_string();
        assert!(
            error.contains("96") && error.contains("[64, 128]"),
            "{error}"
        );
        let most = i32::MAX as usize - 64;
        assert!(PaddedLayout::new(most, 1, 1, HeadDim::D64).is_ok());
        assert!(PaddedLayout::new(most + 1, 1, 1, HeadDim::D64).is_err());
        assert!(PaddedLayout::new(1, usize::MAX, 1, HeadDim::D64).is_err());
        assert!(PaddedLayout::new(1, 1, 1 << 30, HeadDim::D64).is_err());
    }

    proptest! {
        #[test]
        fn documents_never_share_a_block(
            lengths in prop::collection::vec(prop_oneof![0usize..3, 0usize..70, 250usize..260], 1..40)
        ) {
            let documents = Documents::from_lengths(&lengths).unwrap();
            let layout = PaddedLayout::of(&documents, 1, HeadDim::D128).unwrap();
            let mut end = 0;
            for (number, rows) in documents.iter().enumerate() {
                let start = padded_start(rows.start, number);
                prop_assert!(start >= end && start.is_multiple_of(BLOCK));
                end = start + rows.len().next_multiple_of(BLOCK);
            }
            prop_assert!(end <= layout.slots());
        }
    }
}
