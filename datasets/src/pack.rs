//! Documents to rows of T positions, given only their numbers of labels.
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
//! document of its own, so `cu_seqlens` always ends at T.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Documents among which best fit looks for the one that fits best.
pub const LOOK_AHEAD: usize = 256;

/// How documents are laid into rows. Both are deterministic in the order of the documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// One after another; whatever does not fit goes on in the next row. No padding but in the
    /// last row, and many documents cut.
    Concat,
    /// Whole documents, with bounded look-ahead: the oldest waiting document opens a row, then the
    /// longest among the next [`LOOK_AHEAD`] that fits whole is added until none fits. Only a
    /// document longer than a row is ever cut: it fills its row, and its rest opens the next one.
    /// Where no document fits whole, such a long one also begins in the space left, if that is an
    /// eighth of a row or more, since it must be cut in any case.
    #[default]
    BestFit,
}

impl Packing {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Concat, Self::BestFit];

    /// Its name in settings and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Concat => "concat",
            Self::BestFit => "best-fit",
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Packing {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|packing| packing.name() == name)
            .ok_or_else(|| format!("`{name}` is no packing; there are concat and best-fit"))
    }
}

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

impl Piece {
    fn whole((document, labels): (usize, u32)) -> Self {
        Self {
            document,
            start: 0,
            len: labels as usize,
        }
    }
}

/// Lays documents into rows.
pub struct Packer<I> {
    documents: I,
    packing: Packing,
    row_tokens: usize,
    /// In order of arrival; at most [`LOOK_AHEAD`].
    waiting: Vec<usize>,
    /// Their labels; apart, since they are searched for every piece.
    waiting_labels: Vec<i32>,
    /// What is left of the long document cut last.
    rest: Option<Piece>,
}

impl<I: Iterator<Item = (usize, u32)>> Packer<I> {
    /// Packs `(document, labels)` pairs, with labels from 1 to what a shard can count, 2^31 - 1, into
    /// rows of `row_tokens >= 1` positions.
    pub fn new(documents: I, packing: Packing, row_tokens: usize) -> Self {
        Self {
            documents,
            packing,
            row_tokens,
            waiting: Vec::with_capacity(LOOK_AHEAD),
            waiting_labels: Vec::with_capacity(LOOK_AHEAD),
            rest: None,
        }
    }

    /// The next row one document after another.
    fn concat(&mut self) -> Option<Vec<Piece>> {
        let mut space = self.row_tokens;
        let mut row = Vec::new();
        while space > 0 {
            let arriving = || self.documents.next().map(Piece::whole);
            let Some(piece) = self.rest.take().or_else(arriving) else {
                break;
            };
            let piece = self.cut(piece, space);
            space -= piece.len;
            row.push(piece);
        }
        (!row.is_empty()).then_some(row)
    }

    fn refill(&mut self) {
        let missing = LOOK_AHEAD - self.waiting.len();
        for (document, labels) in self.documents.by_ref().take(missing) {
            self.waiting.push(document);
            self.waiting_labels.push(labels as i32);
        }
    }

    fn remove(&mut self, index: usize) -> Piece {
        let labels = self.waiting_labels.remove(index) as u32;
        Piece::whole((self.waiting.remove(index), labels))
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
        // Signed and without branches: so the compiler compares many at once on any x86-64.
        let space = i32::try_from(space).unwrap_or(i32::MAX);
        let fitting = |labels: i32| if labels <= space { labels } else { 0 };
        let all = self.waiting_labels.iter();
        let best = all.fold(0, |best, &labels| best.max(fitting(labels)));
        let place = || {
            self.waiting_labels
                .iter()
                .position(|&labels| labels == best)
        };
        (best > 0).then(place).flatten()
    }

    /// The place of the oldest waiting document that no row holds whole.
    fn longer_than_a_row(&self) -> Option<usize> {
        let is_long = |&labels: &i32| labels as usize > self.row_tokens;
        self.waiting_labels.iter().position(is_long)
    }

    /// The next row of whole documents.
    fn best_fit_row(&mut self) -> Option<Vec<Piece>> {
        self.refill();
        let first = match self.rest.take() {
            Some(rest) => rest,
            None if self.waiting.is_empty() => return None,
            None => self.remove(0),
        };
        let first = self.cut(first, self.row_tokens);
        let mut space = self.row_tokens - first.len;
        let mut row = vec![first];
        while space > 0 {
            self.refill();
            let piece = if let Some(index) = self.best_fit(space) {
                self.remove(index)
            } else if space * 8 >= self.row_tokens
                && let Some(long) = self.longer_than_a_row()
            {
                let long = self.remove(long);
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

impl<I: Iterator<Item = (usize, u32)>> Iterator for Packer<I> {
    type Item = Vec<Piece>;

    fn next(&mut self) -> Option<Vec<Piece>> {
        match self.packing {
            Packing::Concat => self.concat(),
            Packing::BestFit => self.best_fit_row(),
        }
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
    /// Counts one row of these pieces; `document` gives the text tokens and the bytes of one.
    pub(crate) fn add(
        &mut self,
        pieces: &[Piece],
        row_tokens: usize,
        document: impl Fn(usize) -> (u64, u64),
    ) {
        let labels: usize = pieces.iter().map(|piece| piece.len).sum();
        for piece in pieces.iter().filter(|piece| piece.start == 0) {
            let (tokens, bytes) = document(piece.document);
            self.documents += 1;
            self.tokens += tokens;
            self.bytes += bytes;
        }
        self.labels += labels as u64;
        self.padding += (row_tokens - labels) as u64;
        self.pieces += pieces.len() as u64;
        self.rows += 1;
    }

    /// Counts another part of the same data in.
    #[must_use]
    pub(crate) fn plus(self, other: &Self) -> Self {
        Self {
            documents: self.documents + other.documents,
            tokens: self.tokens + other.tokens,
            labels: self.labels + other.labels,
            bytes: self.bytes + other.bytes,
            padding: self.padding + other.padding,
            pieces: self.pieces + other.pieces,
            rows: self.rows + other.rows,
        }
    }

    /// Padding as a share of all positions.
    #[must_use]
    pub fn padding_share(&self) -> f64 {
        self.padding as f64 / (self.labels + self.padding).max(1) as f64
    }
}
