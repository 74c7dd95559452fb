//! `config.json` of a Llama: written from a model's shape, and read back into one.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{HuggingFaceError, Unsupported, read_json};
use crate::model::ModelShape;

/// What `config.json` tells of a Llama.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// The sizes.
    pub shape: ModelShape,
    /// Positions that it was trained for.
    pub max_positions: usize,
    /// The token that begins a document, if it is told.
    pub bos: Option<u32>,
    /// The tokens that end a text; several for some chat models.
    pub eos: Vec<u32>,
}

impl LlamaConfig {
    /// The file's content for weights of the type `torch_dtype` (`bfloat16`).
    pub fn to_json(&self, torch_dtype: &str) -> Value {
        let shape = &self.shape;
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.dim,
            "intermediate_size": shape.ffn_dim,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "attention_bias": false,
            "mlp_bias": false,
            "attention_dropout": 0.0,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "rope_scaling": null,
            "vocab_size": shape.vocab,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": shape.tied,
            "initializer_range": 0.02,
            "bos_token_id": self.bos,
            "eos_token_id": self.eos_json(),
            "torch_dtype": torch_dtype,
            "use_cache": true,
        })
    }

    /// `generation_config.json`, for text that ends where documents did.
    pub fn generation_json(&self) -> Value {
        json!({"bos_token_id": self.bos, "eos_token_id": self.eos_json()})
    }

    /// A number if there is one, as is usual.
    fn eos_json(&self) -> Value {
        match self.eos[..] {
            [eos] => json!(eos),
            _ => json!(self.eos),
        }
    }

    /// Reads `path`, as transformers 4 or 5 writes it.
    ///
    /// # Errors
    /// [`HuggingFaceError::Unsupported`] with everything that the model does not have, and
    /// [`HuggingFaceError::Entry`] for a size that is missing or no number.
    pub fn read(path: &Path) -> Result<Self, HuggingFaceError> {
        let value = read_json(path)?;
        let config = match &value {
            Value::Object(entries) => Entries { path, entries },
            other => return Err(entry(path, "the file", "an object", other)),
        };
        let unsupported = config.unsupported();
        if !unsupported.is_empty() {
            return Err(HuggingFaceError::Unsupported {
                path: path.into(),
                unsupported,
            });
        }
        let heads = config.size("num_attention_heads", None)?;
        let dim = config.size("hidden_size", None)?;
        // What is left out has the values that Hugging Face's Llama gives it.
        let shape = ModelShape {
            vocab: config.size("vocab_size", None)?,
            dim,
            layers: config.size("num_hidden_layers", None)?,
            heads,
            kv_heads: config.size("num_key_value_heads", Some(heads))?,
            head_dim: config.size("head_dim", dim.checked_div(heads))?,
            ffn_dim: config.size("intermediate_size", None)?,
            rope_theta: config.rope_theta()?,
            norm_eps: config.number("rms_norm_eps", 1e-6)?,
            tied: config.switch("tie_word_embeddings")?,
        };
        shape.check()?;
        Ok(Self {
            shape,
            max_positions: config.size("max_position_embeddings", Some(2048))?,
            bos: config.ids("bos_token_id")?.first().copied(),
            eos: config.ids("eos_token_id")?,
        })
    }
}

/// The entries of the file.
struct Entries<'a> {
    path: &'a Path,
    entries: &'a Map<String, Value>,
}

impl Entries<'_> {
    /// The entry; one that is null is as good as left out.
    fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).filter(|value| !value.is_null())
    }

    fn unsupported(&self) -> Vec<Unsupported> {
        type Supports = fn(&Value) -> bool;
        // Left-out entries have the value that is supported, but for the model's type.
        let rules: [(&str, Supports, &str); 12] = [
            (
                "architectures",
                |v| *v == json!(["LlamaForCausalLM"]),
                "[\"LlamaForCausalLM\"]",
            ),
            ("hidden_act", |v| v == "silu", "\"silu\", SwiGLU's"),
            ("attention_bias", is_off, "false: projections have no bias"),
            ("mlp_bias", is_off, "false: projections have no bias"),
            (
                "attention_dropout",
                |v| v.as_f64() == Some(0.0),
                "0: there is no dropout",
            ),
            (
                "rope_scaling",
                is_plain_rope,
                "null: rotary embeddings with a base alone",
            ),
            (
                "rope_parameters",
                is_plain_rope,
                "rope_type \"default\": rotary embeddings with a base alone",
            ),
            (
                "partial_rotary_factor",
                |v| v.as_f64() == Some(1.0),
                "1: all of a head is rotated",
            ),
            (
                "sliding_window",
                |_| false,
                "null: a window is a setting of the run, kernel.window",
            ),
            ("layer_types", is_full_attention, "\"full_attention\" alone"),
            (
                "pretraining_tp",
                |v| v.as_u64() == Some(1),
                "1: products are not sliced",
            ),
            (
                "quantization_config",
                |_| false,
                "null: weights are F32, BF16 or F16",
            ),
        ];
        let refused = rules.into_iter().filter_map(|(key, supports, supported)| {
            let found = self.get(key).filter(|value| !supports(value))?;
            Some(Unsupported {
                key: key.into(),
                found: found.to_string(),
                supported,
            })
        });
        let model_type = self.entries.get("model_type").unwrap_or(&Value::Null);
        let other_type = (model_type != "llama").then(|| Unsupported {
            key: "model_type".into(),
            found: model_type.to_string(),
            supported: "\"llama\"",
        });
        other_type.into_iter().chain(refused).collect()
    }

    fn size(&self, key: &str, default: Option<usize>) -> Result<usize, HuggingFaceError> {
        let Some(value) = self.get(key) else {
            return default.ok_or_else(|| self.entry(key, "a whole number"));
        };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.entry(key, "a whole number"))
    }

    fn number(&self, key: &str, default: f64) -> Result<f64, HuggingFaceError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.entry(key, "a number")),
        }
    }

    fn switch(&self, key: &str) -> Result<bool, HuggingFaceError> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.entry(key, "true or false")),
        }
    }

    /// transformers 5 has it among `rope_parameters`.
    fn rope_theta(&self) -> Result<f64, HuggingFaceError> {
        let inner = self
            .get("rope_parameters")
            .and_then(|parameters| parameters.get("rope_theta"));
        match inner {
            Some(theta) => theta
                .as_f64()
                .ok_or_else(|| self.entry("rope_parameters", "a number as rope_theta")),
            None => self.number("rope_theta", 10000.0),
        }
    }

    /// One id or a list of them.
    fn ids(&self, key: &str) -> Result<Vec<u32>, HuggingFaceError> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let ids = match value {
            Value::Array(ids) => ids.iter().collect(),
            one => vec![one],
        };
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = ids.into_iter().map(id).collect();
        ids.ok_or_else(|| self.entry(key, "a token id or a list of them"))
    }

    fn entry(&self, key: &str, expected: &'static str) -> HuggingFaceError {
        let found = self.entries.get(key).unwrap_or(&Value::Null);
        entry(self.path, key, expected, found)
    }
}

/// The error about an entry; `null` stands for one that is not there as well.
pub(super) fn entry(
    path: &Path,
    key: &str,
    expected: &'static str,
    found: &Value,
) -> HuggingFaceError {
    HuggingFaceError::Entry {
        path: path.into(),
        key: key.into(),
        expected,
        found: found.to_string(),
    }
}

fn is_off(value: &Value) -> bool {
    *value == Value::Bool(false)
}

/// Whether it names no way of scaling, under either of the two names that there have been.
fn is_plain_rope(value: &Value) -> bool {
    let mut kinds = ["rope_type", "type"]
        .iter()
        .filter_map(|key| value.get(key));
    let plain = kinds.all(|kind| kind == "default");
    let partial = value
        .get("partial_rotary_factor")
        .is_some_and(|factor| factor.as_f64() != Some(1.0));
    // Without a kind, a factor is a way of scaling.
    plain && !partial && value.get("factor").is_none()
}

fn is_full_attention(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> LlamaConfig {
        LlamaConfig {
            shape: ModelShape {
                vocab: 300,
                dim: 48,
                layers: 3,
                heads: 6,
                kv_heads: 2,
                head_dim: 64,
                ffn_dim: 100,
                rope_theta: 500000.0,
                norm_eps: 1e-5,
                tied: true,
            },
            max_positions: 512,
            bos: Some(256),
            eos: vec![257],
        }
    }

    fn read(value: &Value) -> Result<LlamaConfig, HuggingFaceError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, value.to_string()).unwrap();
        LlamaConfig::read(&path)
    }

    fn with(key: &str, entry: Value) -> Value {
        let mut value = config().to_json("float32");
        value[key] = entry;
        value
    }

    #[test]
    fn what_is_written_is_read_back() {
        assert_eq!(read(&config().to_json("bfloat16")).unwrap(), config());
        let mut chat = config();
        chat.eos = vec![257, 258];
        chat.shape.tied = false;
        assert_eq!(read(&chat.to_json("float32")).unwrap(), chat);
    }

    #[test]
    fn what_is_left_out_has_the_values_of_hugging_face() {
        let sizes = json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 64,
        });
        let shape = read(&sizes).unwrap().shape;
        assert_eq!((shape.kv_heads, shape.head_dim), (4, 8));
        assert_eq!((shape.norm_eps, shape.rope_theta), (1e-6, 10000.0));
        assert!(!shape.tied);
    }

    #[test]
    fn the_rope_base_of_transformers_5_is_found() {
        let value = with(
            "rope_parameters",
            json!({"rope_theta": 1234.5, "rope_type": "default"}),
        );
        assert_eq!(read(&value).unwrap().shape.rope_theta, 1234.5);
    }

    #[test]
    fn what_the_model_does_not_have_is_refused_by_name() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0});
        for (key, value) in [
            ("model_type", json!("mistral")),
            ("architectures", json!(["LlamaForSequenceClassification"])),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("mlp_bias", json!(true)),
            ("attention_dropout", json!(0.1)),
            ("rope_scaling", llama3.clone()),
            ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
            ("rope_scaling", json!({"factor": 2.0})),
            ("rope_parameters", llama3),
            ("partial_rotary_factor", json!(0.5)),
            ("sliding_window", json!(4096)),
            ("layer_types", json!(["sliding_attention"])),
            ("pretraining_tp", json!(2)),
            ("quantization_config", json!({"quant_method": "fp8"})),
        ] {
            let error = read(&with(key, value.clone())).unwrap_err();
            let HuggingFaceError::Unsupported { unsupported, .. } = &error else {
                panic!("{key}: {error}");
            };
            assert_eq!(unsupported.len(), 1, "{error}");
            assert_eq!(unsupported[0].key, key);
            let told = error.to_string();
            assert!(
                told.contains(&value.to_string()) && told.contains("config.json"),
                "{told}"
            );
        }
    }

    #[test]
    fn a_size_that_is_missing_or_no_number_is_named() {
        for (key, value) in [
            ("hidden_size", Value::Null),
            ("num_hidden_layers", json!("two")),
            ("vocab_size", json!(1.5)),
            ("rms_norm_eps", json!("small")),
            ("eos_token_id", json!([-1])),
        ] {
            let error = read(&with(key, value.clone())).unwrap_err().to_string();
            assert!(error.contains(&format!("{key} = {value}")), "{error}");
        }
        let uneven = with("num_key_value_heads", json!(4));
        assert!(matches!(read(&uneven), Err(HuggingFaceError::Shape(_))));
    }
}
