//! Documents to rows of T positions.
//!
//! A document of n text tokens is the label sequence `t1 .. tn EOS`; the inputs are
//! `BOS t1 .. tn`, so EOS is predicted but never an input. A document that does not fit a row is
//! cut into pieces along its labels. **Every piece begins with BOS**, has its own `cu_seqlens`
//! entry and restarts its positions, and every label of the document stands in exactly one piece:
//!
//! ```text
//! row 0   inputs BOS t1 t2 t3      labels t1 t2 t3 t4
//! row 1   inputs BOS t5 <padding>  labels t5 EOS -100 -100
//! ```
//!
//! The last label of a piece (t4) is therefore no input of the next one; a continuation starts
//! from BOS without context, and the loss counts each token once. Padding at a row's end is a
//! document of its own, so `cu_seqlens` always ends at T, with labels [`IGNORE`].

use crate::store::TokenStore;
use crate::tokenizer::Tokenizer;

/// The label of positions that carry no loss: padding.
pub const IGNORE: i64 = -100;

/// Documents among which the packer looks for the one that fits best.
pub const LOOK_AHEAD: usize = 256;

/// A run of a document's labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The document's number.
    pub document: usize,
    /// The first label.
    pub start: usize,
    /// How many labels, and so positions.
    pub len: usize,
}

/// Lays documents into rows, given only their numbers of labels.
///
/// Best fit with bounded look-ahead: the oldest waiting document opens a row, then the longest
/// among the next [`LOOK_AHEAD`] that fits whole is added until none fits. Only a document longer
/// than a row is ever cut: it fills its row, and its rest opens the next one. Where no document
/// fits whole, such a long one also begins in the space left, if that is an eighth of a row or
/// more, since it must be cut in any case. Deterministic in the order of the documents.
pub struct Packer<I> {
    documents: I,
    row_tokens: usize,
    /// In order of arrival; at most [`LOOK_AHEAD`].
    waiting: Vec<Piece>,
    /// What is left of the long document cut last.
    rest: Option<Piece>,
}

impl<I: Iterator<Item = (usize, usize)>> Packer<I> {
    /// Packs `(document, labels)` pairs, `labels >= 1`, into rows of `row_tokens >= 1` positions.
    pub fn new(documents: I, row_tokens: usize) -> Self {
        Self {
            documents,
            row_tokens,
            waiting: Vec::with_capacity(LOOK_AHEAD),
            rest: None,
        }
    }

    fn refill(&mut self) {
        let missing = LOOK_AHEAD - self.waiting.len();
        let pieces = self.documents.by_ref().take(missing);
        self.waiting.extend(pieces.map(|(document, len)| Piece {
            document,
            start: 0,
            len,
        }));
    }

    /// Cuts `piece` to the space and keeps the rest for the next row.
    fn cut(&mut self, piece: Piece, space: usize) -> Piece {
        let len = piece.len.min(space);
        if len < piece.len {
            self.rest = Some(Piece {
                start: piece.start + len,
                len: piece.len - len,
                ..piece
            });
        }
        Piece { len, ..piece }
    }

    /// The place of the longest waiting document that fits whole; of equals, the oldest.
    fn best_fit(&self, space: usize) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (index, piece) in self.waiting.iter().enumerate() {
            if piece.len <= space && best.is_none_or(|best| piece.len > self.waiting[best].len) {
                best = Some(index);
            }
        }
        best
    }
}

impl<I: Iterator<Item = (usize, usize)>> Iterator for Packer<I> {
    type Item = Vec<Piece>;

    fn next(&mut self) -> Option<Vec<Piece>> {
        self.refill();
        let first = match self.rest.take() {
            Some(rest) => rest,
            None if self.waiting.is_empty() => return None,
            None => self.waiting.remove(0),
        };
        let first = self.cut(first, self.row_tokens);
        let mut space = self.row_tokens - first.len;
        let mut row = vec![first];
        while space > 0 {
            self.refill();
            let piece = if let Some(index) = self.best_fit(space) {
                self.waiting.remove(index)
            } else if space * 8 >= self.row_tokens
                && let Some(long) = self.waiting.iter().position(|p| p.len > self.row_tokens)
            {
                let long = self.waiting.remove(long);
                self.cut(long, space)
            } else {
                break;
            };
            space -= piece.len;
            row.push(piece);
        }
        Some(row)
    }
}

/// One packed row of T positions, ready to become tensors.
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
    /// this for nats per byte.
    pub bytes: u64,
}

impl Row {
    /// Positions that carry a loss.
    #[must_use]
    pub fn label_count(&self) -> usize {
        self.tokens.len() - self.padding
    }

    pub(crate) fn assemble(
        pieces: &[Piece],
        row_tokens: usize,
        store: &TokenStore,
        tokenizer: &Tokenizer,
    ) -> Self {
        let mut row = Self {
            tokens: Vec::with_capacity(row_tokens),
            labels: Vec::with_capacity(row_tokens),
            positions: Vec::with_capacity(row_tokens),
            cu_seqlens: Vec::with_capacity(pieces.len() + 2),
            padding: 0,
            bytes: 0,
        };
        row.cu_seqlens.push(0);
        for piece in pieces {
            let text = store.tokens_of(piece.document);
            let end = piece.start + piece.len;
            let text_end = end.min(text.len());
            let labels = text[piece.start..text_end].iter().map(|&id| i64::from(id));
            let inputs = text[piece.start..end - 1].iter().map(|&id| i64::from(id));
            row.tokens.push(i64::from(tokenizer.bos()));
            row.tokens.extend(inputs);
            row.labels.extend(labels);
            if end > text.len() {
                row.labels.push(i64::from(tokenizer.eos()));
            }
            let lengths = &store.byte_lengths_of(piece.document)[piece.start..text_end];
            row.bytes += lengths.iter().map(|&length| u64::from(length)).sum::<u64>();
            row.end_piece();
        }
        row.padding = row_tokens - row.tokens.len();
        if row.padding > 0 {
            row.tokens.resize(row_tokens, i64::from(tokenizer.pad()));
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

/// What became of the documents: `labels + padding == rows * T`, and
/// `labels == tokens + documents`.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PackReport {
    /// Documents, each with one EOS label.
    pub documents: u64,
    /// Text tokens, without BOS and EOS.
    pub tokens: u64,
    /// Positions that carry a loss.
    pub labels: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// Positions without a loss.
    pub padding: u64,
    /// Pieces; more than documents where a document is longer than a row.
    pub pieces: u64,
    /// Rows.
    pub rows: u64,
}

impl PackReport {
    /// Counts one row: its pieces, the rest by `store`.
    pub(crate) fn add(&mut self, pieces: &[Piece], row_tokens: usize, store: &TokenStore) {
        let labels: usize = pieces.iter().map(|piece| piece.len).sum();
        let begun = pieces.iter().filter(|piece| piece.start == 0);
        for piece in begun {
            self.documents += 1;
            self.tokens += store.tokens_of(piece.document).len() as u64;
            let lengths = store.byte_lengths_of(piece.document).iter();
            self.bytes += lengths.map(|&length| u64::from(length)).sum::<u64>();
        }
        self.labels += labels as u64;
        self.padding += (row_tokens - labels) as u64;
        self.pieces += pieces.len() as u64;
        self.rows += 1;
    }
}
