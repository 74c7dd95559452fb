//! Cross-entropy over text, by token and by byte.

use std::iter::Sum;
use std::ops::Add;

/// A summed cross-entropy and what it was summed over.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// The sum, in nats.
    pub nats: f64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of text that those tokens stand for.
    pub bytes: u64,
}

impl Loss {
    /// Nats per token.
    pub fn per_token(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// Nats per byte of text, which compares across tokenizers.
    pub fn per_byte(&self) -> f64 {
        self.nats / self.bytes as f64
    }
}

impl Add for Loss {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            nats: self.nats + other.nats,
            tokens: self.tokens + other.tokens,
            bytes: self.bytes + other.bytes,
        }
    }
}

impl Sum for Loss {
    fn sum<I: Iterator<Item = Self>>(losses: I) -> Self {
        losses.fold(Self::default(), Add::add)
    }
}
