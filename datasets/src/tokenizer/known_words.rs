//! The ids of words met before: most of a text are words of a few thousand.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use tokenizers::Model;

/// Words that a thread remembers: a few megabytes.
const MAX_WORDS: usize = 1 << 15;

/// Longer ones do not come again.
const MAX_WORD_BYTES: usize = 32;

/// One memory for each thread, so that none waits for another.
pub(super) struct KnownWords(Vec<Mutex<Words>>);

#[derive(Default)]
struct Words(HashMap<Box<str>, Box<[u32]>>);

/// A thread's memory, or none, if more threads than expected share it.
pub(super) struct Known<'a>(Option<MutexGuard<'a, Words>>);

impl Default for KnownWords {
    fn default() -> Self {
        let threads = rayon::current_num_threads();
        Self((0..threads).map(|_| Mutex::default()).collect())
    }
}

impl KnownWords {
    pub(super) fn of_this_thread(&self) -> Known<'_> {
        let thread = rayon::current_thread_index().unwrap_or(0);
        Known(self.0[thread % self.0.len()].try_lock().ok())
    }
}

impl Known<'_> {
    /// Adds the ids of a word that the model sees alone.
    pub(super) fn extend(
        &mut self,
        ids: &mut Vec<u32>,
        word: &str,
        model: &tokenizers::Tokenizer,
    ) -> tokenizers::Result<()> {
        if let Some(Words(words)) = self.0.as_deref()
            && let Some(known) = words.get(word)
        {
            ids.extend_from_slice(known);
            return Ok(());
        }
        let before = ids.len();
        let tokens = model.get_model().tokenize(word)?;
        ids.extend(tokens.iter().map(|token| token.id));
        if let Some(Words(words)) = self.0.as_deref_mut()
            && word.len() <= MAX_WORD_BYTES
            && words.len() < MAX_WORDS
        {
            words.insert(word.into(), ids[before..].into());
        }
        Ok(())
    }
}
