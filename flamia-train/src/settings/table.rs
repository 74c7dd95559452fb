//! The table of settings: key, type, default and help, once.
//!
//! The help is the doc comment; its first paragraph is what `-h` shows.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::choice::{Attention, Device, Dq, Hadamard, Profile};
use super::key::{Key, Setting, settings_table};

settings_table! {
    "Run" {
        /// What to learn from: a Parquet file, or a folder of Parquet shards.
        ///
        /// Only the column `text` is needed; one row is one document. FineWeb-Edu's shards can be
        /// given as they are.
        data: Option<PathBuf> = None,
            meaning "the built-in corpus: Markdown and Rust sources of this build's dependencies";
        /// A Hugging Face tokenizer.json.
        ///
        /// Losses are per token: with bytes they are in nats per byte, with any other tokenizer
        /// they cannot be compared with those.
        tokenizer: Option<PathBuf> = None, meaning "bytes";
        /// The run's folder: checkpoints, TensorBoard events, settings, summary and plot.
        out: Option<PathBuf> = None, meaning "runs/<UTC time>-<attention>";
        /// Continue the run in `--out`, or the newest run, from its last checkpoint.
        ///
        /// The run's own settings then stand before `--config`, the environment and flags.
        resume: bool = false;
        /// Which attention every layer calls.
        ///
        /// `mxfp8` is the low-bit path, forward and backward; `reference` is exact attention in
        /// FP32, to compare with; `sdpa` is torch's own, called per document, as a baseline.
        attention: Attention = Attention::Mxfp8;
        /// Where to train: auto takes the first GPU that torch can use, else the CPU.
        device: Device = Device::Auto;
        /// CPU threads, for torch and for the attention; 0 takes all cores.
        ///
        /// Runs are repeatable bit for bit with the same number of threads.
        threads: usize = 0;
        /// The seed of the weights, of the order of documents and of the validation split.
        seed: u64 = 0;
        /// Optimiser steps.
        steps: usize = 1000;
    }

    model: ModelSettings, "Model" {
        /// Width of the residual stream, in features.
        dim: usize = 128;
        /// Transformer blocks.
        layers: usize = 4;
        /// Query heads per layer.
        heads: usize = 2;
        /// Key and value heads per layer, a divisor of the query heads (grouped-query attention).
        kv_heads: usize = 1;
        /// Features per head: 64 or 128.
        head_dim: usize = 64;
        /// Hidden width of the SwiGLU feed-forward layer, in features.
        ffn_dim: usize = 384;
        /// Whether the output projection is the embedding table itself.
        tied: bool = true;
        /// Base of the rotary position embedding's wavelengths.
        ///
        /// Positions restart in every document. Long contexts want more: Llama 3 uses 500000.
        rope_theta: f64 = 10000.0;
        /// What RMSNorm adds to the mean square.
        norm_eps: f64 = 1e-5;
        /// Standard deviation of the initial weights.
        ///
        /// Narrow models want more, about 0.6 / sqrt(dim); 0.02 suits a width of 1,024.
        init_std: f64 = 0.05;
    }

    batch: BatchSettings, "Batch" {
        /// Tokens in a packed row.
        ///
        /// A document longer than a row continues in the next one as a piece of its own.
        row_tokens: usize = 512;
        /// Packed rows per micro-batch.
        rows: usize = 4;
        /// Micro-batches whose gradients make one optimiser step.
        accumulate: usize = 1;
    }

    optim: OptimSettings, "Optimiser (AdamW)" {
        /// Peak learning rate, per step.
        lr: f64 = 2e-3;
        /// The last learning rate as a share of the peak, where the cosine ends.
        min_lr_ratio: f64 = 0.1;
        /// Steps over which the learning rate rises from zero to its peak.
        ///
        /// A run shorter than the default takes a fifth of its steps unless this is given.
        warmup: usize = 150;
        /// Decay of the gradient's running mean, per step.
        beta1: f64 = 0.9;
        /// Decay of the squared gradient's running mean, per step.
        beta2: f64 = 0.95;
        /// What is added to the root of the squared gradient's running mean.
        eps: f64 = 1e-8;
        /// Decoupled weight decay, on matrices only.
        weight_decay: f64 = 0.1;
        /// Largest norm of the gradient over all parameters; longer ones are scaled down to it.
        clip: f64 = 1.0;
    }

    kernel: KernelSettings, "MXFP8 attention" {
        /// How operand scales are applied, as on Blackwell (block-scaled) or as on Hopper.
        profile: Profile = Profile::BlockScaled;
        /// Rotate Q and K by the Hadamard transform before quantising them.
        ///
        /// It spreads outlier features over the head dimension. auto is on at head dimension 128.
        hadamard: Hadamard = Hadamard::Auto;
        /// Format in which partial sums of dQ are accumulated.
        dq: Dq = Dq::Fp16;
        /// Attention weights are scaled by 2^c before they are rounded to E4M3.
        ///
        /// More keeps smaller weights; c + tau must not pass log2(448), E4M3's largest number.
        c: usize = 4;
        /// How far, in powers of two, a row's maximum may rise before sums are rescaled to it.
        tau: f64 = 4.0;
    }

    eval: EvalSettings, "Evaluation" {
        /// Steps between evaluations on the validation documents.
        every: usize = 100;
        /// Packed rows of validation documents to evaluate on.
        rows: usize = 64;
        /// Share of the documents kept apart for validation, from 0 to 1, both excluded.
        fraction: f64 = 0.05;
    }

    checkpoint: CheckpointSettings, "Checkpoints" {
        /// Steps between checkpoints.
        every: usize = 200;
        /// How many of the last checkpoints to keep; the best one is kept besides.
        keep: usize = 2;
    }

    log: LogSettings, "Logging" {
        /// Steps between TensorBoard points.
        every: usize = 1;
    }
}

impl Settings {
    /// Every setting with its value as listings show it.
    pub(super) fn values(&self) -> Vec<(&'static Key, String)> {
        keys().iter().zip(self.shown()).collect()
    }
}
