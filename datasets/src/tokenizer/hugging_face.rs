//! A `tokenizer.json`, stripped of everything that would add, drop or vary tokens.

use std::path::Path;

use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, OffsetReferential, OffsetType, PostProcessorWrapper, PreTokenizer};

use super::known_words::KnownWords;
use super::{TokenizerError, start_of};

/// Names that begin a document, best first. GPT-2 has one token for both ends.
const BOS_NAMES: &[&str] = &[
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|startoftext|>",
    "[CLS]",
    "<|endoftext|>",
];

/// Names that end a document, best first.
const EOS_NAMES: &[&str] = &[
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "[SEP]",
    "<|im_end|>",
];

pub(super) struct HuggingFace {
    model: tokenizers::Tokenizer,
    vocab_size: usize,
    known: KnownWords,
}

impl HuggingFace {
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let not_a_tokenizer = |reason: tokenizers::Error| TokenizerError::NotATokenizer {
            path: path.to_owned(),
            reason: reason.to_string(),
        };
        let mut model = tokenizers::Tokenizer::from_bytes(bytes).map_err(not_a_tokenizer)?;
        model.with_truncation(None).map_err(not_a_tokenizer)?;
        model.with_padding(None);
        model.with_post_processor(None::<PostProcessorWrapper>);
        if let ModelWrapper::BPE(bpe) = model.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            model.with_model(bpe);
        }
        // Only tokens marked special are passed over in raw text; some files leave the mark out.
        let control = BOS_NAMES.iter().chain(EOS_NAMES);
        let unmarked: Vec<AddedToken> = model
            .get_added_tokens_decoder()
            .into_values()
            .filter(|token| !token.special && control.clone().any(|name| token.content == *name))
            .map(|token| token.special(true))
            .collect();
        model
            .add_special_tokens(unmarked)
            .map_err(not_a_tokenizer)?;
        model.set_encode_special_tokens(true);

        let largest = model
            .get_vocab(true)
            .into_values()
            .max()
            .ok_or_else(|| not_a_tokenizer("its vocabulary is empty".into()))?;
        Ok(Self {
            model,
            vocab_size: largest as usize + 1,
            known: KnownWords::default(),
        })
    }

    /// Ids may have holes, so this is not the number of entries.
    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn special_id(
        &self,
        path: &Path,
        role: &'static str,
        given: Option<u32>,
    ) -> Result<u32, TokenizerError> {
        let tried = if role == "BOS" { BOS_NAMES } else { EOS_NAMES };
        let named = || tried.iter().find_map(|name| self.model.token_to_id(name));
        given
            .or_else(named)
            .ok_or_else(|| TokenizerError::NoSpecialToken {
                path: path.to_owned(),
                role,
                tried,
            })
    }

    /// As the library's own `encode`, which makes a string of every token that nobody wants here.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let failed = |error: tokenizers::Error| TokenizerError::Encode {
            start: start_of(text),
            reason: error.to_string(),
        };
        let model = &self.model;
        let added = model.get_added_vocabulary();
        let mut words = added.extract_and_normalize(model.get_normalizer(), text);
        if let Some(pre_tokenizer) = model.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words).map_err(failed)?;
        }
        let mut ids = Vec::with_capacity(text.len() / 4);
        let mut known = self.known.of_this_thread();
        for (word, _, tokens) in words.get_splits(OffsetReferential::Original, OffsetType::None) {
            match tokens {
                // Found by the added vocabulary.
                Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                None => known.extend(&mut ids, word, model).map_err(failed)?,
            }
        }
        Ok(ids)
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.model
            .decode(ids, false)
            .map_err(|error| TokenizerError::Decode {
                count: ids.len(),
                reason: error.to_string(),
            })
    }
}
