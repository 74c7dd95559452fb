//! From ids to text that can be shown as it comes.

use datasets::{Tokenizer, TokenizerError};

/// What decoding puts where bytes are no character, or not yet one.
const NO_CHARACTER: char = '\u{FFFD}';

/// Ids before the newest that are decoded with them: a word's space or case can depend on what is before it.
const LOOK_BACK: usize = 16;

/// Text that grows by ids and is given out character by whole character.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Bytes of the text of `ids` that were given out, or were the prompt.
    given: usize,
}

impl<'a> TextStream<'a> {
    /// The text that follows the ids `prompt`.
    ///
    /// # Errors
    /// [`TokenizerError`] when they are no text.
    pub fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, TokenizerError> {
        let mut stream = Self {
            tokenizer,
            ids: prompt.to_vec(),
            given: 0,
        };
        stream.forget()?;
        Ok(stream)
    }

    /// Takes the next id, and gives what is new of the text and whole.
    ///
    /// # Errors
    /// [`TokenizerError`] when the ids are no text.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let whole = text.trim_end_matches(NO_CHARACTER);
        let new = whole.get(self.given..).unwrap_or_default().to_owned();
        self.given = self.given.max(whole.len());
        // Only where every id is given out whole can the text be cut.
        if whole.len() == text.len() {
            self.forget()?;
        }
        Ok(new)
    }

    /// What is left when no more ids come: a character that was never finished.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn rest(&mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.ids)?;
        let new = text.get(self.given..).unwrap_or_default().to_owned();
        self.given = text.len();
        Ok(new)
    }

    /// Forgets all but the last ids, whose text has been given out.
    fn forget(&mut self) -> Result<(), TokenizerError> {
        self.ids.drain(..self.ids.len().saturating_sub(LOOK_BACK));
        self.given = self.tokenizer.decode(&self.ids)?.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_whole_and_as_soon_as_they_are() {
        let tokenizer = Tokenizer::byte_level();
        let prompt = tokenizer.encode("Grüße, ").unwrap();
        let mut stream = TextStream::new(&tokenizer, &prompt).unwrap();
        let text = "naïve 日本 🦀 and more than the ids that are kept: é";
        let mut given = String::new();
        for (i, byte) in text.bytes().enumerate() {
            given += &stream.push(byte.into()).unwrap();
            let whole = (0..=i + 1)
                .rev()
                .find(|&end| text.is_char_boundary(end))
                .unwrap();
            assert_eq!(given, &text[..whole]);
        }
        assert_eq!(stream.rest().unwrap(), "");
    }

    #[test]
    fn what_is_no_utf8_is_marked_and_loses_nothing_after_it() {
        let tokenizer = Tokenizer::byte_level();
        let mut stream = TextStream::new(&tokenizer, &[]).unwrap();
        let given: Vec<_> = [b'a', 0xFF, b'b', 0xE2, 0x82]
            .into_iter()
            .map(|byte| stream.push(byte.into()).unwrap())
            .collect();
        assert_eq!(given, ["a", "", "\u{FFFD}b", "", ""]);
        assert_eq!(stream.rest().unwrap(), "\u{FFFD}");
    }
}
