//! A packed row of T positions, ready to become tensors.

use crate::bin_file::Ids;
use crate::pack::Piece;

/// The label of positions that carry no loss: padding.
pub const IGNORE: i64 = -100;

/// One packed row; [`crate::pack`] tells how inputs and labels stand in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Inputs, T ids.
    pub tokens: Vec<i64>,
    /// What each position predicts, T ids or [`IGNORE`].
    pub labels: Vec<i64>,
    /// T positions that restart at 0 with each piece.
    pub positions: Vec<i64>,
    /// Where pieces begin, and T; the padding, if any, is the last piece.
    pub cu_seqlens: Vec<i64>,
    /// Padded positions at the end.
    pub padding: usize,
    /// Bytes of text that the labels stand for; EOS counts none. Divide a row's summed loss by
    /// this for nats per byte. The pieces of a document share its bytes in proportion to their
    /// tokens, and all of them together have all of its bytes.
    pub bytes: u64,
}

/// The ids that are no text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    pub(crate) bos: u32,
    pub(crate) eos: u32,
    pub(crate) pad: u32,
}

/// A row's part of a document: the document's ids, BOS first, and its bytes.
pub(crate) struct Part<'a> {
    pub(crate) piece: Piece,
    pub(crate) ids: Ids<'a>,
    pub(crate) text_bytes: u32,
}

impl Row {
    /// Positions that carry a loss.
    #[must_use]
    pub fn label_count(&self) -> usize {
        self.tokens.len() - self.padding
    }

    pub(crate) fn assemble<'a>(
        parts: impl ExactSizeIterator<Item = Part<'a>>,
        row_tokens: usize,
        control: Control,
    ) -> Self {
        let mut row = Self {
            tokens: Vec::with_capacity(row_tokens),
            labels: Vec::with_capacity(row_tokens),
            positions: Vec::with_capacity(row_tokens),
            cu_seqlens: Vec::with_capacity(parts.len() + 2),
            padding: 0,
            bytes: 0,
        };
        row.cu_seqlens.push(0);
        for Part {
            piece,
            ids,
            text_bytes,
        } in parts
        {
            let (start, end) = (piece.start, piece.start + piece.len);
            // Label i is token i + 1 behind the document's BOS; the last is EOS.
            let text = ids.len() - 1;
            row.tokens.push(control.bos.into());
            ids.slice(start + 1..end).extend(&mut row.tokens);
            ids.slice(start + 1..end.min(text) + 1)
                .extend(&mut row.labels);
            if end > text {
                row.labels.push(control.eos.into());
            }
            row.bytes +=
                bytes_before(end, text, text_bytes) - bytes_before(start, text, text_bytes);
            row.end_piece();
        }
        row.padding = row_tokens - row.tokens.len();
        if row.padding > 0 {
            row.tokens.resize(row_tokens, control.pad.into());
            row.labels.resize(row_tokens, IGNORE);
            row.end_piece();
        }
        row
    }

    /// Numbers the positions added since the last piece and closes it.
    fn end_piece(&mut self) {
        let len = self.tokens.len() - self.positions.len();
        self.positions.extend(0..len as i64);
        self.cu_seqlens.push(self.tokens.len() as i64);
    }
}

/// Bytes of text that the first `labels` labels of a document with `text` tokens stand for.
fn bytes_before(labels: usize, text: usize, text_bytes: u32) -> u64 {
    if labels > text {
        return text_bytes.into();
    }
    // Without tokens, all bytes belong to EOS.
    (labels as u64 * u64::from(text_bytes)) / text.max(1) as u64
}
