//! The settings that a preset's name stands for.

use config::ValueKind;

use super::choice::Preset;
use super::error::SettingsError;
use super::layer::Layer;

/// How the place of a preset's values begins, as errors and listings tell it.
pub(super) const PRESET_PLACE: &str = "preset ";

impl Layer {
    /// The preset that this source names.
    pub(super) fn preset(&self) -> Option<Preset> {
        match self.value("preset")? {
            ValueKind::String(name) => name.parse().ok(),
            _ => None,
        }
    }

    /// The values of `preset`.
    pub(super) fn of_preset(preset: Preset) -> Result<Self, SettingsError> {
        let mut layer = Self::default();
        for (path, value) in values(preset) {
            layer.add_known(path, value, &format!("{PRESET_PLACE}{preset}"))?;
        }
        Ok(layer)
    }
}

/// Keys and values, in words as flags have them.
fn values(preset: Preset) -> &'static [(&'static str, &'static str)] {
    match preset {
        Preset::Tiny => &[],
        // Learning rate and warm-up as wide models want them; weights as 0.6 / sqrt(1024).
        Preset::Byte75m => &[
            ("model.layers", "6"),
            ("model.dim", "1024"),
            ("model.heads", "8"),
            ("model.kv_heads", "8"),
            ("model.head_dim", "128"),
            ("model.ffn_dim", "2816"),
            ("model.tied", "false"),
            ("model.init_std", "0.02"),
            ("batch.row_tokens", "1024"),
            ("batch.rows", "32"),
            ("optim.lr", "6e-4"),
            ("optim.warmup", "200"),
        ],
        Preset::Llama1b => &[
            ("model.layers", "16"),
            ("model.dim", "2048"),
            ("model.heads", "16"),
            ("model.kv_heads", "4"),
            ("model.head_dim", "128"),
            ("model.ffn_dim", "8192"),
            ("model.tied", "true"),
            ("model.rope_theta", "500000"),
            ("model.init_std", "0.02"),
            ("batch.row_tokens", "16384"),
            ("batch.rows", "1"),
            ("optim.lr", "3e-4"),
            ("optim.warmup", "1000"),
        ],
        Preset::Llama8b => &[
            ("model.layers", "32"),
            ("model.dim", "4096"),
            ("model.heads", "32"),
            ("model.kv_heads", "8"),
            ("model.head_dim", "128"),
            ("model.ffn_dim", "14336"),
            ("model.tied", "false"),
            ("model.rope_theta", "500000"),
            ("model.init_std", "0.02"),
            ("batch.row_tokens", "8192"),
            ("batch.rows", "1"),
            ("optim.lr", "3e-4"),
            ("optim.warmup", "1000"),
        ],
    }
}
