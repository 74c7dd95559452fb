//! The loss of a checkpoint through the attention it trained with and through exact attention.
//!
//! The loss through the training kernel alone does not show a leak (section 3.2 of the paper): a model that
//! learned to read later tokens from a kernel's scales has a low loss through that kernel, and a higher one where
//! attention is exact.

use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tch::Device;

use crate::attention::Attention;
use crate::batch::MicroBatch;
use crate::commands::EvalArgs;
use crate::data::validation_batches;
use crate::error::TrainError;
use crate::evaluate::evaluate;
use crate::loss::Loss;
use crate::model::{Model, Precision};
use crate::parts::Parts;
use crate::saved::{Saved, SavedError};
use crate::settings::{self, KernelSettings, Named, Settings};
use crate::setup::attention_on;
use crate::stop::Stop;

/// A loss lower through the kernel by more than this many nats per token, and by more than three standard
/// errors, is told as a leak. The paper's leaks (section 4.5) cost 0.06 nats per byte and more.
const LEAK_NATS: f64 = 0.005;
const LEAK_ERRORS: f64 = 3.0;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum LeakTestError {
    /// The checkpoint.
    #[error(transparent)]
    Saved(#[from] SavedError),
    /// Data, device or an evaluation.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// Nothing to measure on.
    #[error(
        "the data has no validation row: give --data with more documents, or a larger share with \
         -- --eval-fraction"
    )]
    NoRows,
}

/// A loss through one attention.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Through {
    /// The attention.
    pub attention: settings::Attention,
    /// Nats per token.
    pub nats_per_token: f64,
    /// Nats per byte of text.
    pub nats_per_byte: f64,
    /// `exp` of the loss per token.
    pub perplexity: f64,
}

impl Through {
    fn new(attention: settings::Attention, losses: &[Loss]) -> Self {
        let loss: Loss = losses.iter().copied().sum();
        Self {
            attention,
            nats_per_token: loss.per_token(),
            nats_per_byte: loss.per_byte(),
            perplexity: loss.per_token().exp(),
        }
    }
}

/// What was measured, and on what.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeakTest {
    /// The checkpoint's folder.
    pub checkpoint: PathBuf,
    /// Steps that it had been trained for.
    pub step: u64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of text that they stand for.
    pub bytes: u64,
    /// Through the attention of the settings.
    pub kernel: Through,
    /// Through exact attention.
    pub exact: Through,
    /// Kernel minus exact, in nats per token.
    pub difference: f64,
    /// The standard error of the difference over micro-batches; none with a single one.
    pub standard_error: Option<f64>,
    /// Whether the loss through the kernel is so low that later tokens must have shown.
    pub leaks: bool,
    /// What differs from the run: settings and data.
    pub changes: Vec<String>,
    /// Where it was computed, in words.
    pub device: String,
}

impl LeakTest {
    /// Measures what the command line asks for. `note` is told what a user should know meanwhile.
    ///
    /// # Errors
    /// [`LeakTestError`].
    pub fn run(args: &EvalArgs, note: &mut dyn FnMut(&str)) -> Result<Self, LeakTestError> {
        let saved = Saved::open(&args.saved.path, &args.changes())?;
        for warning in &saved.warnings {
            note(&format!("warning: {warning}"));
        }
        let settings = &saved.settings;
        let parts = Parts::new(settings)?;
        let (dataset, device) = (&parts.dataset, parts.device);
        let tokenizer = dataset.tokenizer();
        saved.check_tokenizer(tokenizer.name(), tokenizer.sha256())?;
        let mut changes: Vec<String> = saved.changes.iter().map(ToString::to_string).collect();
        if dataset.identity().texts != saved.state.data_identity.texts {
            changes.push(
                "the data's documents are not those of the run, which may have trained on some of these"
                    .into(),
            );
        }
        let model = saved.model(tokenizer.vocab_size(), device)?;
        let batches = validation_batches(dataset, settings, device)?;
        if batches.is_empty() {
            return Err(LeakTestError::NoRows);
        }

        let exact = with_exact(settings, args.exact, device, model.precision);
        let mut computed = vec![parts.device_words.clone()];
        for settings in [settings, &exact] {
            computed.extend(attention_on(device, settings)?);
        }
        note(&format!("device: {}", computed.join("; ")));
        note(&format!(
            "checkpoint: {}, after step {}",
            saved.checkpoint.display(),
            saved.state.step
        ));

        let bar = bar(2 * batches.len());
        let losses = |settings: &Settings| {
            bar.set_message(settings.attention.to_string());
            losses(
                &model,
                &batches,
                &Attention::new(settings),
                saved.state.step,
                &bar,
            )
        };
        let (through_kernel, through_exact) = (losses(settings)?, losses(&exact)?);
        bar.finish_and_clear();

        let kernel = Through::new(settings.attention, &through_kernel);
        let exact = Through::new(exact.attention, &through_exact);
        let total: Loss = through_exact.iter().copied().sum();
        let difference = kernel.nats_per_token - exact.nats_per_token;
        let standard_error = standard_error(&through_kernel, &through_exact);
        Ok(Self {
            checkpoint: saved.checkpoint,
            step: saved.state.step,
            tokens: total.tokens,
            bytes: total.bytes,
            kernel,
            exact,
            difference,
            standard_error,
            leaks: leaks(difference, standard_error),
            changes,
            device: computed.swap_remove(0),
        })
    }

    /// What a person is shown.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.add_row(["through", "nats/token", "nats/byte", "perplexity"]);
        for (what, through) in [("kernel", &self.kernel), ("exact", &self.exact)] {
            table.add_row([
                format!("{} ({what})", through.attention),
                format!("{:.5}", through.nats_per_token),
                format!("{:.5}", through.nats_per_byte),
                format!("{:.4}", through.perplexity),
            ]);
        }
        let per_byte = self.kernel.nats_per_byte - self.exact.nats_per_byte;
        table.add_row([
            "difference".into(),
            format!("{:+.5}", self.difference),
            format!("{per_byte:+.5}"),
            format!("{:+.4}", self.kernel.perplexity - self.exact.perplexity),
        ]);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut lines = vec![
            format!(
                "{}, after step {}: {} tokens of {} bytes",
                self.checkpoint.display(),
                self.step,
                self.tokens,
                self.bytes
            ),
            table.to_string(),
        ];
        lines.extend(
            self.changes
                .iter()
                .map(|change| format!("other than in the run: {change}")),
        );
        lines.push(self.verdict());
        lines.join("\n")
    }

    fn verdict(&self) -> String {
        let error = self
            .standard_error
            .map(|error| format!(" (standard error {error:.5})"))
            .unwrap_or_default();
        let difference = format!("{:+.5} nats/token{error}", self.difference);
        match self.leaks {
            true => format!(
                "LEAK: the loss is lower through {} than through exact attention, {difference}: later tokens \
                 show in earlier results. `cargo xtask probe leakage` tells where",
                self.kernel.attention
            ),
            false => format!(
                "no sign of a leak: {difference} through {}",
                self.kernel.attention
            ),
        }
    }
}

/// `settings` with exact attention instead of theirs, of the same window.
fn with_exact(
    settings: &Settings,
    asked: Option<settings::Attention>,
    device: Device,
    precision: Precision,
) -> Settings {
    let reference = settings::Attention::Path(flamia_kernels::Path::Reference);
    let by_default = match (device, precision, settings.kernel.window) {
        (Device::Cpu, ..) => reference,
        (_, Precision::Bf16, 0) => settings::Attention::Flash,
        _ => settings::Attention::Sdpa,
    };
    Settings {
        attention: asked.unwrap_or(by_default),
        kernel: KernelSettings {
            window: settings.kernel.window,
            backend: Named(flamia_kernels::Backend::Host),
            ..KernelSettings::default()
        },
        ..settings.clone()
    }
}

/// The loss of each micro-batch.
fn losses(
    model: &Model,
    batches: &[MicroBatch],
    attention: &Attention,
    step: u64,
    bar: &ProgressBar,
) -> Result<Vec<Loss>, TrainError> {
    let never = Stop::default();
    let mut losses = Vec::with_capacity(batches.len());
    for batch in batches {
        let loss = evaluate(model, std::slice::from_ref(batch), attention, &never)
            .map_err(|source| TrainError::Evaluate { step, source })?;
        losses.extend(loss);
        bar.inc(1);
    }
    Ok(losses)
}

/// Of the difference per token, which is a ratio of sums over micro-batches.
fn standard_error(kernel: &[Loss], exact: &[Loss]) -> Option<f64> {
    let n = kernel.len() as f64;
    let pairs = || kernel.iter().zip(exact);
    let tokens: f64 = exact.iter().map(|loss| loss.tokens as f64).sum();
    let mean = pairs().map(|(k, e)| k.nats - e.nats).sum::<f64>() / tokens;
    let squares: f64 = pairs()
        .map(|(k, e)| (k.nats - e.nats - mean * e.tokens as f64).powi(2))
        .sum();
    (n > 1.0).then(|| (squares * n / (n - 1.0)).sqrt() / tokens)
}

fn leaks(difference: f64, standard_error: Option<f64>) -> bool {
    let noise = LEAK_ERRORS * standard_error.unwrap_or(0.0);
    difference < -noise.max(LEAK_NATS)
}

/// On standard error, if that is a terminal.
fn bar(batches: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{pos}/{len} {bar:16} ETA {eta} {wide_msg}");
    ProgressBar::new(batches as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_batches_have_the_textbook_error() {
        let of = |nats: &[f64]| -> Vec<Loss> {
            let loss = |&nats: &f64| Loss {
                nats,
                tokens: 10,
                bytes: 10,
            };
            nats.iter().map(loss).collect()
        };
        // Differences per token 0.1, 0.2, 0.3 and 0.4: s = 0.1291, divided by the root of 4.
        let error = standard_error(&of(&[2.0, 4.0, 6.0, 8.0]), &of(&[1.0, 2.0, 3.0, 4.0]));
        assert!((error.unwrap() - 0.0645497).abs() < 1e-6, "{error:?}");
        assert_eq!(standard_error(&of(&[1.0]), &of(&[2.0])), None);
    }

    #[test]
    fn a_leak_is_a_loss_that_is_lower_beyond_rounding_and_chance() {
        for (difference, error, expected) in [
            (-0.06, Some(0.001), true),
            (-0.06, None, true),
            (-0.06, Some(0.03), false),
            (-0.002, Some(1e-5), false),
            (0.06, Some(0.001), false),
        ] {
            assert_eq!(leaks(difference, error), expected, "{difference} {error:?}");
        }
    }

    #[test]
    fn a_gpu_computes_exact_attention_itself_where_it_can() {
        let mut settings = Settings::default();
        let name = |settings: &Settings, asked, device, precision| {
            with_exact(settings, asked, device, precision)
                .attention
                .to_string()
        };
        let gpu = Device::Cuda(0);
        assert_eq!(
            name(&settings, None, Device::Cpu, Precision::Fp32),
            "reference"
        );
        assert_eq!(name(&settings, None, gpu, Precision::Bf16), "flash");
        assert_eq!(name(&settings, None, gpu, Precision::Fp32), "sdpa");
        let asked = Some(settings::Attention::Sdpa);
        assert_eq!(name(&settings, asked, gpu, Precision::Bf16), "sdpa");
        settings.kernel.window = 7;
        assert_eq!(name(&settings, None, gpu, Precision::Bf16), "sdpa");
        let exact = with_exact(&settings, None, Device::Cpu, Precision::Fp32);
        assert_eq!(exact.kernel.window, 7);
    }
}
