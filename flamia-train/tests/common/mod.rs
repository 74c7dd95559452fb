//! What several test files share.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod plain_llama;
pub mod run;

use flamia_sched::{Documents, Mask};
use flamia_train::attention::Attention;
use flamia_train::checkpoint::{TrainState, Validation};
use flamia_train::guard::GuardState;
use flamia_train::model::{Model, ModelShape, Params};
use flamia_train::optim::AdamWConfig;
use flamia_train::settings::Settings;
use flamia_train::summary::Versions;
use tch::{Device, Tensor};

/// The baseline.
pub const CAUSAL_SDPA: Attention = Attention::Sdpa { mask: Mask::Causal };

/// The settings that runs have by default, but for the learning rate.
pub const ADAMW: AdamWConfig = AdamWConfig {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
};

/// A model small enough for finite differences, with every feature: grouped heads, a head
/// dimension that is not `dim / heads`, an untied output head.
pub fn tiny_shape() -> ModelShape {
    ModelShape {
        vocab: 11,
        dim: 8,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn_dim: 12,
        rope_theta: 100.0,
        norm_eps: 1e-5,
        tied: false,
    }
}

/// A model whose weights are large enough for every part of it to matter.
pub fn model(shape: ModelShape, seed: u64) -> Model {
    let params = Params::init(&shape.parameters(0.4), seed, Device::Cpu).unwrap();
    Model::new(shape, params)
}

/// The attention of that name, with default numerics.
pub fn attention(name: &str) -> Attention {
    Attention::new(&Settings {
        attention: name.parse().unwrap(),
        ..Settings::default()
    })
}

/// A packed row: tokens, labels within each document (its last token has none), positions.
pub struct Packed {
    pub documents: Documents,
    pub tokens: Tensor,
    pub labels: Tensor,
    pub positions: Tensor,
}

pub fn pack(documents: &[Vec<i64>]) -> Packed {
    let lengths: Vec<usize> = documents.iter().map(Vec::len).collect();
    let tokens: Vec<i64> = documents.concat();
    let labels: Vec<i64> = documents
        .iter()
        .flat_map(|document| labels(document))
        .collect();
    let positions: Vec<i64> = lengths
        .iter()
        .flat_map(|&length| 0..length as i64)
        .collect();
    Packed {
        documents: Documents::from_lengths(&lengths).unwrap(),
        tokens: Tensor::from_slice(&tokens),
        labels: Tensor::from_slice(&labels),
        positions: Tensor::from_slice(&positions),
    }
}

/// The next token of each but the last token, which has none.
pub fn labels(document: &[i64]) -> Vec<i64> {
    let next = document.iter().skip(1).copied();
    next.chain([-100]).take(document.len()).collect()
}

pub fn floats(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0f32; tensor.numel()];
    let count = values.len();
    tensor.contiguous().copy_data(&mut values, count);
    values
}

/// The state of a run after `step` steps.
pub fn state(step: u64) -> TrainState {
    TrainState {
        step,
        tokens: 100 * step,
        data: datasets::Position {
            epoch: 1,
            row: step,
        },
        data_identity: datasets::Identity {
            texts: "a".into(),
            tokenizer: "b".into(),
            bos: 1,
            eos: 2,
            row_tokens: 64,
            seed: 3,
            validation_fraction: 0.1,
            packing: datasets::Packing::default(),
            shuffle: datasets::Shuffle::default(),
        },
        seed: 3,
        validation: Validation::default(),
        train_loss: Some(0.1 + 0.2),
        seconds: 1.5,
        step_seconds: 1.25,
        flops: 1e9,
        guard: GuardState::default(),
        settings_sha256: "c".into(),
        versions: Versions::of_this_build("2.11.0".into(), "a CPU".into(), 1),
    }
}
