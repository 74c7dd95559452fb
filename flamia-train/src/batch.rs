//! A micro-batch on its device: packed rows laid one after another.

use datasets::Row;
use flamia_sched::{Documents, DocumentsError, Mask};
use tch::{Device, TchError, Tensor};

use crate::attention::Attend;
use crate::device::send;
use crate::loss::Loss;
use crate::model::{Model, ModelError};

/// The rows of one forward pass, as one packed row of `T` tokens.
#[derive(Debug)]
pub struct MicroBatch {
    tokens: Tensor,
    labels: Tensor,
    positions: Tensor,
    documents: Documents,
    /// The padding of each row.
    padding: Documents,
    /// Tokens that are to be predicted.
    pub label_tokens: u64,
    /// Bytes of text that they stand for.
    pub bytes: u64,
}

/// Why rows could not be laid out.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Their tensors.
    #[error("torch refused a batch")]
    Torch(#[from] TchError),
    /// The rows' documents make no packed row, as when there are too many tokens for one.
    #[error("{rows} rows cannot be one micro-batch")]
    Documents {
        /// Rows.
        rows: usize,
        /// Why.
        source: DocumentsError,
    },
}

impl MicroBatch {
    /// Lays `rows` one after another on `device`.
    ///
    /// # Errors
    /// [`BatchError`].
    pub fn new(rows: &[Row], device: Device) -> Result<Self, BatchError> {
        let tensor = |of: fn(&Row) -> &[i64]| {
            let values: Vec<i64> = rows.iter().flat_map(of).copied().collect();
            send(&Tensor::f_from_slice(&values)?, device)
        };
        let unfit = |source| BatchError::Documents {
            rows: rows.len(),
            source,
        };
        let documents = rows
            .iter()
            .map(|row| Documents::from_cu_seqlens(&row.cu_seqlens, row.tokens.len()))
            .collect::<Result<Vec<_>, _>>()
            .and_then(|rows| Documents::concat(&rows))
            .map_err(unfit)?;
        let padding: Vec<usize> = rows.iter().map(|row| row.padding).collect();
        Ok(Self {
            tokens: tensor(|row| &row.tokens)?,
            labels: tensor(|row| &row.labels)?,
            positions: tensor(|row| &row.positions)?,
            documents,
            padding: Documents::from_lengths(&padding).map_err(unfit)?,
            label_tokens: rows.iter().map(|row| row.label_count() as u64).sum(),
            bytes: rows.iter().map(|row| row.bytes).sum(),
        })
    }

    /// The documents of all rows, padding included as one of each row that has any.
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// Pairs of a query and a key that it sees under `mask`, without those of the padding.
    pub fn visible_pairs(&self, mask: Mask) -> u64 {
        self.documents.visible_pairs(mask) - self.padding.visible_pairs(mask)
    }

    /// [`Model::summed_loss`] of these rows.
    ///
    /// # Errors
    /// As there.
    pub fn summed_loss(&self, model: &Model, attention: &dyn Attend) -> Result<Tensor, ModelError> {
        let Self {
            tokens,
            labels,
            positions,
            documents,
            ..
        } = self;
        model.summed_loss(tokens, positions, labels, documents, attention)
    }

    /// What the loss will be summed over.
    pub fn counts(&self) -> Loss {
        Loss {
            nats: 0.0,
            tokens: self.label_tokens,
            bytes: self.bytes,
        }
    }
}

/// How well rows are packed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Packing {
    rows: u64,
    documents: u64,
    tokens: u64,
    padding: u64,
    /// Tokens of the longest document or piece of one.
    pub longest: usize,
}

impl Packing {
    /// Counts `rows` in.
    pub fn add(&mut self, rows: &[Row]) {
        for row in rows {
            // The padding is the last document, and is none.
            let bounds = row
                .cu_seqlens
                .windows(2)
                .map(|bounds| (bounds[1] - bounds[0]) as usize);
            let documents = row.cu_seqlens.len() - 1 - usize::from(row.padding > 0);
            self.rows += 1;
            self.documents += documents as u64;
            self.tokens += row.tokens.len() as u64;
            self.padding += row.padding as u64;
            self.longest = bounds.take(documents).fold(self.longest, usize::max);
        }
    }

    /// Documents, or pieces of one, in a row, on average.
    pub fn documents_per_row(&self) -> f64 {
        self.documents as f64 / self.rows as f64
    }

    /// Padding as a share of all tokens.
    pub fn padding_share(&self) -> f64 {
        self.padding as f64 / self.tokens as f64
    }
}
