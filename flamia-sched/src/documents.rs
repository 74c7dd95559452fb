//! The boundaries of the documents in a packed row, checked once.

use std::ops::Range;

use crate::Mask;

/// The documents of one packed row: where each starts and ends.
///
/// Always holds: `cu_seqlens` starts at 0, never decreases and ends at the number of rows, which
/// fits an `i32` (the type that kernels read). Documents therefore lie dense; padding is a document
/// of its own. An empty document is legal anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documents {
    cu_seqlens: Vec<i32>,
}

/// Why document boundaries were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentsError {
    /// Fewer than two boundaries bound no document.
    #[error(
        "cu_seqlens has length {entries}, which bounds no document: give the start of the first \
         document (0) and the end of every document, so [0, {total}] for a single one"
    )]
    TooShort {
        /// Number of entries found.
        entries: usize,
        /// Rows of the packed row.
        total: usize,
    },
    /// The first document does not start at row 0.
    #[error(
        "cu_seqlens[0] is {value}, but the first document starts at row 0: put a 0 in front (a \
         plain cumulative sum of lengths lacks it)"
    )]
    Start {
        /// The first entry.
        value: i64,
    },
    /// A boundary before the packed row.
    #[error(
        "cu_seqlens[{index}] is {value}: boundaries are row numbers and cannot be negative (an \
         overflowing 32-bit cumulative sum looks like this)"
    )]
    Negative {
        /// Index of the bad entry.
        index: usize,
        /// The bad entry.
        value: i64,
    },
    /// A boundary before its predecessor.
    #[error(
        "cu_seqlens[{index}] is {value}, before cu_seqlens[{}] = {previous}: sort the boundaries; \
         an empty document repeats its predecessor", index - 1
    )]
    Decreasing {
        /// Index of the bad entry.
        index: usize,
        /// The bad entry.
        value: i64,
        /// The entry in front of it.
        previous: i64,
    },
    /// A boundary past the packed row.
    #[error(
        "cu_seqlens[{index}] is {value}, past the end of the packed row, which has {total} rows: \
         the boundaries and the tensor belong to different rows"
    )]
    PastEnd {
        /// Index of the bad entry.
        index: usize,
        /// The bad entry.
        value: i64,
        /// Rows of the packed row.
        total: usize,
    },
    /// Rows after the last document.
    #[error(
        "cu_seqlens[{index}], the last one, is {value}, but the packed row has {total} rows: end \
         it at {total}, with the padding as a document of its own"
    )]
    End {
        /// Index of the bad entry.
        index: usize,
        /// The bad entry.
        value: i64,
        /// Rows of the packed row.
        total: usize,
    },
    /// More rows than a boundary can count.
    #[error(
        "a packed row of {total} rows is longer than 32-bit boundaries can count ({max}): split it",
        max = i32::MAX
    )]
    TooManyRows {
        /// Rows asked for, saturated at `usize::MAX`.
        total: usize,
    },
    /// More documents than can be numbered.
    #[error("{count} documents are more than a packed row may hold ({max}): split it", max = i32::MAX)]
    TooManyDocuments {
        /// Documents asked for.
        count: usize,
    },
}

impl Documents {
    /// Checks boundaries that came from outside against a packed row of `total` rows.
    ///
    /// At least two entries are demanded, even for `total == 0`: a lone one is what a lost
    /// cumulative sum leaves.
    ///
    /// # Errors
    /// Names the first entry that no valid `cu_seqlens` could have at its place, or a `total`
    /// above `i32::MAX`.
    pub fn from_cu_seqlens(cu_seqlens: &[i64], total: usize) -> Result<Self, DocumentsError> {
        let end = i64::from(row_count(total)?);
        let [first, rest @ ..] = cu_seqlens else {
            return Err(DocumentsError::TooShort { entries: 0, total });
        };
        if *first != 0 {
            return Err(DocumentsError::Start { value: *first });
        }
        if rest.is_empty() {
            return Err(DocumentsError::TooShort { entries: 1, total });
        }
        let mut checked = Vec::with_capacity(cu_seqlens.len());
        checked.push(0i32);
        let mut previous = 0;
        for (index, &value) in (1..).zip(rest) {
            if value < 0 {
                return Err(DocumentsError::Negative { index, value });
            }
            if value < previous {
                return Err(DocumentsError::Decreasing {
                    index,
                    value,
                    previous,
                });
            }
            let boundary = match i32::try_from(value) {
                Ok(boundary) if value <= end => boundary,
                _ => {
                    return Err(DocumentsError::PastEnd {
                        index,
                        value,
                        total,
                    });
                }
            };
            checked.push(boundary);
            previous = value;
        }
        if previous != end {
            return Err(DocumentsError::End {
                index: rest.len(),
                value: previous,
                total,
            });
        }
        Ok(Self {
            cu_seqlens: checked,
        })
    }

    /// Documents of the given lengths, one after another.
    ///
    /// # Errors
    /// When there are more than `i32::MAX` rows or documents.
    pub fn from_lengths(lengths: &[usize]) -> Result<Self, DocumentsError> {
        Self::lay_out(lengths.iter().copied())
    }

    /// One document of `len` rows.
    ///
    /// # Errors
    /// When `len` is above `i32::MAX`.
    pub fn single(len: usize) -> Result<Self, DocumentsError> {
        Self::batched(1, len)
    }

    /// `batch` documents of `len` rows each: a dense `[batch, len]` tensor seen as one packed row.
    ///
    /// # Errors
    /// When there are more than `i32::MAX` rows or documents.
    pub fn batched(batch: usize, len: usize) -> Result<Self, DocumentsError> {
        row_count(batch.saturating_mul(len))?;
        Self::lay_out(std::iter::repeat_n(len, batch))
    }

    /// The rows of a micro-batch laid after one another as a single packed row.
    ///
    /// # Errors
    /// When there are more than `i32::MAX` rows or documents in all.
    pub fn concat(rows: &[Documents]) -> Result<Self, DocumentsError> {
        let count = rows.iter().map(Documents::len).sum();
        document_count(count)?;
        let lengths: Vec<usize> = rows
            .iter()
            .flat_map(|row| row.iter().map(|document| document.len()))
            .collect();
        Self::from_lengths(&lengths)
    }

    fn lay_out(lengths: impl ExactSizeIterator<Item = usize>) -> Result<Self, DocumentsError> {
        document_count(lengths.len())?;
        let mut cu_seqlens = Vec::with_capacity(lengths.len() + 1);
        cu_seqlens.push(0);
        let mut total = 0usize;
        for length in lengths {
            total = total.saturating_add(length);
            cu_seqlens.push(row_count(total)?);
        }
        Ok(Self { cu_seqlens })
    }

    /// Rows of all documents together.
    pub fn total(&self) -> usize {
        self.boundary(self.len())
    }

    /// Number of documents, empty ones included.
    pub fn len(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Whether there is no document, not even an empty one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The boundaries: document `i` is rows `cu_seqlens[i]..cu_seqlens[i + 1]`.
    pub fn cu_seqlens(&self) -> &[i32] {
        &self.cu_seqlens
    }

    /// The rows of document `index`, `None` past the last one.
    pub fn get(&self, index: usize) -> Option<Range<usize>> {
        (index < self.len()).then(|| self.boundary(index)..self.boundary(index + 1))
    }

    /// The rows of every document in order, empty ones included.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range<usize>> {
        (0..self.len()).map(|index| self.boundary(index)..self.boundary(index + 1))
    }

    /// Length of the longest document, 0 if there is none.
    pub fn longest(&self) -> usize {
        self.iter()
            .map(|document| document.len())
            .max()
            .unwrap_or(0)
    }

    /// How many (query, key) pairs attention computes. FLOP counts are 4·pairs·`head_dim` for the
    /// forward pass of one head, and 2.5 times that for the backward pass.
    pub fn visible_pairs(&self, mask: Mask) -> u64 {
        self.iter()
            .map(|document| {
                let len = document.len() as u64;
                match mask {
                    Mask::Causal => len * (len + 1) / 2,
                    Mask::Full => len * len,
                    Mask::Window(keys) => {
                        let full = len.min(keys.get() as u64);
                        full * (full + 1) / 2 + (len - full) * full
                    }
                }
            })
            .sum()
    }

    /// For every row its index inside its document, as rotary embeddings need it.
    pub fn position_ids(&self) -> Vec<i64> {
        self.iter()
            .flat_map(|document| 0..document.len() as i64)
            .collect()
    }

    /// For every row the index of its document. Empty documents own no row, so their index is
    /// skipped.
    pub fn document_ids(&self) -> Vec<i64> {
        (0..)
            .zip(self.iter())
            .flat_map(|(id, document)| std::iter::repeat_n(id, document.len()))
            .collect()
    }

    fn boundary(&self, index: usize) -> usize {
        self.cu_seqlens[index] as usize
    }
}

fn row_count(total: usize) -> Result<i32, DocumentsError> {
    i32::try_from(total).map_err(|_| DocumentsError::TooManyRows { total })
}

fn document_count(count: usize) -> Result<i32, DocumentsError> {
    i32::try_from(count).map_err(|_| DocumentsError::TooManyDocuments { count })
}
