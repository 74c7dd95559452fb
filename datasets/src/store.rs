//! Token ids of many documents, end to end in memory.

use crate::tokenizer::Encoded;

/// Documents in the order they were pushed. `u32` ids, so that no vocabulary wraps.
#[derive(Debug, Default)]
pub(crate) struct TokenStore {
    tokens: Vec<u32>,
    byte_lengths: Vec<u32>,
    /// Where each document ends in the two lists above.
    ends: Vec<usize>,
}

impl TokenStore {
    pub(crate) fn push(&mut self, document: &Encoded) {
        self.tokens.extend_from_slice(&document.ids);
        self.byte_lengths.extend_from_slice(&document.byte_lengths);
        self.ends.push(self.tokens.len());
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Labels of all documents: each one's text tokens and its EOS.
    pub(crate) fn labels(&self) -> usize {
        self.tokens.len() + self.ends.len()
    }

    /// 0 where there is none.
    pub(crate) fn largest_token(&self) -> u32 {
        self.tokens.iter().copied().max().unwrap_or(0)
    }

    pub(crate) fn labels_of(&self, document: usize) -> usize {
        self.span(document).len() + 1
    }

    pub(crate) fn tokens_of(&self, document: usize) -> &[u32] {
        &self.tokens[self.span(document)]
    }

    pub(crate) fn byte_lengths_of(&self, document: usize) -> &[u32] {
        &self.byte_lengths[self.span(document)]
    }

    fn span(&self, document: usize) -> std::ops::Range<usize> {
        let start = document
            .checked_sub(1)
            .map_or(0, |previous| self.ends[previous]);
        start..self.ends[document]
    }
}
