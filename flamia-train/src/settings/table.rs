//! The table of settings: key, type, default and help, once.
//!
//! The help is the doc comment; its first paragraph is what `-h` shows.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use flamia_kernels::{
    Backend, BackwardForm, DkRounding, DqAccumulator, DsExponent, Exponential, Hadamard,
    Normaliser, OperandScales, Path, Profile, ValueScales,
};
use serde::{Deserialize, Serialize};

use super::choice::{
    Ablate, Attention, Auto, AutoSwitch, Device, Named, Packing, Precision, Preset,
};
use super::key::{Key, Setting, settings_table};

settings_table! {
    "Run" {
        /// A named model with rows and a learning rate that suit it; other settings win over it.
        ///
        /// tiny is the defaults. byte-75m: 6 layers, width 1,024, 8 heads of 128, for bytes in
        /// contexts of 1,024. llama-1b: 16 layers, width 2,048, 16 heads of 128 on 4 key/value heads;
        /// llama-8b: 32 layers, width 4,096, 32 heads of 128 on 8. These two are for Llama 3's
        /// tokenizer of 128,256 entries, which --tokenizer takes, and for GPUs.
        preset: Preset = Preset::Tiny;
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
        /// `mxfp8`, `nvfp4` (scores in 4 bits) and `fp4` (all in 4 bits) are the low-bit paths, forward
        /// and backward; `reference` is exact attention in FP32, to compare with; `sdpa` is torch's
        /// own, called per document, and `flash` its FlashAttention 2 in BF16 on packed documents,
        /// for GPUs: the baselines.
        attention: Attention = Attention::Path(Path::Mxfp8);
        /// Where to train: auto takes the first GPU that torch can use, else the CPU.
        device: Device = Device::Auto;
        /// CPU threads, for torch and for the attention; 0 takes all cores.
        ///
        /// Runs on the CPU are repeatable bit for bit with the same number of threads; attention's kernels
        /// on a GPU with --kernel-backward two-kernel.
        threads: usize = 0;
        /// The seed of the weights, of the order of documents, of the validation split and of stochastic
        /// rounding.
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
        /// Features per head: 64, 96, 128 or 256.
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
        /// How training documents are laid into rows.
        ///
        /// best-fit keeps documents whole unless they are longer than a row, and pads a little;
        /// concat lays them one after another and cuts them at row ends.
        packing: Packing = Packing::BestFit;
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

    compute: ComputeSettings, "Computation" {
        /// What matrix products are computed in, attention's baselines among them.
        ///
        /// auto is bf16 on a GPU and fp32 on the CPU. With bf16, weights, moments, gradients, norms,
        /// the residual stream and the loss stay in FP32.
        precision: Precision = Precision::Auto;
        /// Tokens whose logits the loss holds at once; 0 for as many as have 2^26 logits.
        ///
        /// A micro-batch of more tokens is taken in chunks of so many: large vocabularies need it.
        loss_chunk: usize = 0;
        /// The device's dense BF16 rate in TFLOP/s, to which utilisation refers; 0 goes by the GPU's name.
        ///
        /// Without a rate that is given or known, no utilisation is logged.
        peak_tflops: f64 = 0.0;
    }

    kernel: KernelSettings, "Attention numerics" {
        /// How operand scales are applied, as on Blackwell (block-scaled) or as on Hopper.
        ///
        /// auto is hopper where a Hopper GPU's kernels compute, block-scaled elsewhere. hopper goes
        /// with attention mxfp8 and with none of the exact options.
        profile: Named<Profile> = Named(Profile::Auto);
        /// Who computes attention when the model is on a GPU: its kernels (auto) or the host.
        ///
        /// Kernels there are for mxfp8 on Hopper, head dimension 64 or 128; auto refuses the rest. The
        /// host is the reference, and slow.
        backend: Named<Backend> = Named(Backend::Auto);
        /// A sliding window: how many keys a query sees, its own included; 0 for all before it.
        window: usize = 0;
        /// Rotate Q and K by the Hadamard transform before quantising them.
        ///
        /// It spreads outlier features over the head dimension. auto is on at head dimension 128,
        /// for mxfp8 and nvfp4.
        hadamard: Named<Hadamard> = Named(Hadamard::Auto);
        /// All exact options: no result of a position depends on a later one, bit for bit.
        ///
        /// It stands for operand_scales token, ds_exponent row, dq fp16-causal and, for fp4, both
        /// folds on, wherever those are left at auto.
        exact: bool = false;
        /// What a scale of Q, K, V or dO covers: a block of 32 tokens, or one token.
        ///
        /// With blocks, a later token can re-round those before it in its block. auto is block, and
        /// token with exact.
        operand_scales: Auto<OperandScales> = Auto::Auto;
        /// What an exponent of dS covers: 32 queries by 32 keys, or 32 entries of one row.
        ///
        /// auto is square, and row with exact. fp4 has rows only.
        ds_exponent: Auto<DsExponent> = Auto::Auto;
        /// How partial sums of dQ are accumulated.
        ///
        /// fp16 has one power of two per document and head, fp16-causal one per query row that no
        /// later key shows in. auto is fp16, and fp16-causal with exact.
        dq: Auto<DqAccumulator> = Auto::Auto;
        /// How many kernels compute the gradients in profile hopper: one, two, or as is faster on a GPU.
        ///
        /// auto is one-kernel on a GPU where documents have 400 tokens or more on average, every query head
        /// has keys of its own and dq is fp16, and two-kernel elsewhere. one-kernel adds dQ up in no fixed
        /// order; two-kernel gives the same bits in every run, whatever auto would pick. one-kernel goes with
        /// profile hopper alone.
        backward: Named<BackwardForm> = Named(BackwardForm::Auto);
        /// Attention weights are scaled by 2^c before they are rounded to E4M3.
        ///
        /// More keeps smaller weights; c + tau must not pass log2(448), E4M3's largest number.
        c: usize = 4;
        /// How far, in powers of two, a row's maximum may rise before sums are rescaled to it.
        ///
        /// 0 is the exact running maximum.
        tau: f64 = 4.0;
        /// The sum of attention weights that outputs are divided by: of rounded or unrounded ones.
        ///
        /// With rounded ones what all values have in common cancels in the gradients. auto is rounded in
        /// profile hopper, and unrounded, as in the paper, elsewhere. For mxfp8 and nvfp4.
        normaliser: Named<Normaliser> = Named(Normaliser::Auto);
        /// How 2^x is evaluated in both passes.
        ///
        /// mitchell-p and schraudolph are for inference only, and refused by training.
        exponential: Named<Exponential> = Named(Exponential::Exact);
        /// Degree of the polynomial exponential, 2 to 5.
        polynomial_degree: usize = 3;
        /// Of every eight pairs of keys, how many the polynomial exponential evaluates, 0 to 8.
        polynomial_eighths: usize = 4;
        /// fp4: where V has a scale per key, on diagonal tiles or everywhere.
        value_scales: Named<ValueScales> = Named(ValueScales::Diagonal);
        /// fp4: whether dP reads V with per-key scales where the forward pass does; auto is on.
        v_fold: AutoSwitch = AutoSwitch::Auto;
        /// fp4: whether dQ reads K with per-key scales instead of groups of 32 keys; auto is on.
        k_fold: AutoSwitch = AutoSwitch::Auto;
        /// fp4: how the dS operand of dK is rounded; auto is stochastic.
        dk_rounding: Auto<DkRounding> = Auto::Auto;
        /// A defect to study, which makes attention wrong on purpose.
        ///
        /// unquantised-d takes D from the unquantised dO, output-d (fp4) from another V and P than those
        /// of dS; tiling, p4-forward and exp-forward let the
        /// two passes differ in another way; floor-exponents, per-tensor and grouped-v leak later
        /// tokens into earlier ones; unclamped-polynomial and saturate drop a safeguard.
        ablate: Ablate = Ablate(None);
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
        /// Whether to save at every new lowest validation loss too.
        best: bool = true;
    }

    guard: GuardSettings, "Guard rails" {
        /// Steps in a row whose loss or gradient is not finite, after which the run saves and stops.
        ///
        /// Each such step leaves weights and moments as they are; the run goes on with the next rows.
        skip_limit: usize = 10;
        /// Steps that a step's loss and gradient norm are compared with, at least 8.
        spike_window: usize = 128;
        /// How far above the median of those steps a jump lies, in median absolute deviations.
        ///
        /// A jump is reported in the run's folder, with the documents of its step. A deviation counts as at
        /// least a thousandth of the median, so that a curve without noise reports no trifles.
        spike_factor: f64 = 10.0;
        /// How many reports of jumps and of steps that are not finite a run keeps; 0 for none.
        ///
        /// The newest stay.
        spike_reports: usize = 20;
    }

    log: LogSettings, "Logging" {
        /// Steps between TensorBoard points.
        every: usize = 1;
    }

    distributed: DistributedSettings, "Several processes" {
        /// Seconds without a sign of life after which a rank counts as lost, and the job ends.
        ///
        /// A resumed run does not take this group's settings over: ranks meet before they read it.
        lost_after: f64 = 30.0;
        /// Seconds that ranks wait for each other, at the start and in an operation.
        ///
        /// It must be longer than rank 0 takes to save a checkpoint.
        patience: f64 = 600.0;
        /// Mebibytes of gradients that are sent at once, while the backward goes on.
        bucket_mib: usize = 25;
    }
}

impl Settings {
    /// Every setting with its value as listings show it.
    pub(super) fn values(&self) -> Vec<(&'static Key, String)> {
        keys().iter().zip(self.shown()).collect()
    }
}
