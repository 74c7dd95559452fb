//! From the settings of attention to the kernels' options, and the kernels' refusals in words of
//! the settings.

use std::num::NonZero;

use flamia_kernels::{AttentionError, Mask, Options, Path, Polynomial};

use super::choice::Attention;
use super::error::Problem;
use super::table::{KernelSettings, Settings};

impl KernelSettings {
    /// Which keys of its document a query sees.
    #[must_use]
    pub fn mask(&self) -> Mask {
        NonZero::new(self.window).map_or(Mask::Causal, Mask::Window)
    }

    /// The options of a call on `path`. The seed of stochastic rounding is left to whoever calls.
    #[must_use]
    pub fn options(&self, path: Path) -> Options {
        let plain = Options::new(path, self.mask());
        let auto = if self.exact { plain.exact() } else { plain };
        Options {
            profile: self.profile.0,
            backend: self.backend.0,
            hadamard: self.hadamard.0,
            // What does not fit is out of range, and refused as that.
            c: i32::try_from(self.c).unwrap_or(i32::MAX),
            tau: self.tau as f32,
            normaliser: self.normaliser.0,
            dq: self.dq.unwrap_or(auto.dq),
            backward: self.backward.0,
            operand_scales: self.operand_scales.unwrap_or(auto.operand_scales),
            ds_exponent: self.ds_exponent.unwrap_or(auto.ds_exponent),
            exponential: self.exponential.0,
            polynomial: Polynomial {
                degree: u32::try_from(self.polynomial_degree).unwrap_or(u32::MAX),
                eighths: u32::try_from(self.polynomial_eighths).unwrap_or(u32::MAX),
            },
            value_scales: self.value_scales.0,
            v_fold: self.v_fold.unwrap_or(auto.v_fold),
            k_fold: self.k_fold.unwrap_or(auto.k_fold),
            dk_rounding: self.dk_rounding.unwrap_or(auto.dk_rounding),
            ablate: self.ablate.0,
            ..auto
        }
    }
}

impl Settings {
    /// What the kernels refuse, if anything. Torch's own attention has the options of exact
    /// attention: none but the mask.
    pub(super) fn numerics_problem(&self) -> Option<Problem> {
        let path = match self.attention {
            Attention::Path(path) => path,
            Attention::Sdpa | Attention::Flash => Path::Reference,
        };
        if self.attention == Attention::Flash && self.kernel.window != 0 {
            return Some(Problem {
                fields: self.fields(|path| matches!(path, "attention" | "kernel.window")),
                rule: "flash is called without a sliding window".into(),
                fix: Some("give --attention sdpa or mxfp8, which have one".into()),
            });
        }
        let options = self.kernel.options(path);
        if let Err(error) = options.validate_training(self.model.head_dim) {
            return Some(self.told(&error));
        }
        (self.kernel.exact && options != options.exact()).then(|| Problem {
            fields: self.fields(|path| self.is_chosen_numerics(path)),
            rule: "exact asks for operand_scales token, ds_exponent row, dq fp16-causal and, for \
                   fp4, both folds"
                .into(),
            fix: Some("leave those at auto, or leave exact out".into()),
        })
    }

    fn told(&self, error: &AttentionError) -> Problem {
        let fields = match error {
            AttentionError::HeadDim { .. } => {
                self.fields(|path| matches!(path, "model.head_dim" | "kernel.profile"))
            }
            AttentionError::Saturates { .. } => {
                self.fields(|path| matches!(path, "kernel.c" | "kernel.tau"))
            }
            AttentionError::OutOfRange { option, .. } => {
                let key = format!("kernel.{}", option.replace(' ', "_"));
                self.fields(|path| path == key)
            }
            AttentionError::InferenceOnly { .. } => {
                self.fields(|path| path == "kernel.exponential")
            }
            _ => self.fields(|path| path == "attention" || self.is_chosen_numerics(path)),
        };
        Problem {
            fields,
            rule: error.to_string(),
            fix: None,
        }
    }

    /// Whether `path` is a setting of the kernels' that is not at its default.
    fn is_chosen_numerics(&self, path: &str) -> bool {
        path.starts_with("kernel.")
            && self
                .values()
                .iter()
                .any(|(key, value)| key.path == path && *value != key.default)
    }
}
