//! What is kept of a step's rows until its loss has been read.

use datasets::{IGNORE, Position, Row};

/// The text of a packed row and where its documents begin, in four bytes a token.
#[derive(Debug, Clone)]
pub struct KeptRow {
    /// The pass over the training documents.
    pub epoch: u64,
    /// The row's number in it, from 0.
    pub row: u64,
    /// Positions, padding included.
    pub tokens: usize,
    /// Padded positions at the end.
    pub padding: usize,
    /// Where documents, or pieces of one, begin, and where the last ends.
    pub bounds: Vec<usize>,
    /// What the positions before the padding predict: the text, and EOS where a document ends.
    labels: Vec<u32>,
}

impl KeptRow {
    /// Of `row`, after which its stream of rows stood at `after`.
    pub fn new(row: &Row, after: Position) -> Self {
        let real = row.tokens.len() - row.padding;
        let bounds = row.cu_seqlens.iter().map(|&bound| bound as usize);
        Self {
            epoch: after.epoch,
            row: after.row.saturating_sub(1),
            tokens: row.tokens.len(),
            padding: row.padding,
            // The padding is a piece, and no document.
            bounds: bounds.filter(|&bound| bound <= real).collect(),
            labels: row
                .labels
                .iter()
                .filter(|&&id| id != IGNORE)
                .filter_map(|&id| u32::try_from(id).ok())
                .collect(),
        }
    }

    /// Start, end and labels of each document.
    pub fn documents(&self) -> impl Iterator<Item = (usize, usize, &[u32])> {
        self.bounds.windows(2).map(|bounds| {
            let (start, end) = (bounds[0], bounds[1]);
            let labels = self.labels.get(start..end).unwrap_or_default();
            (start, end, labels)
        })
    }
}
