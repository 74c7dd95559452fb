//! The model against the plain f64 oracle, and what packing must not change.
#![cfg(feature = "torch")]

mod common;

use std::slice::from_ref;

use common::plain_llama::PlainLlama;
use common::{CAUSAL_SDPA, Packed, attention, floats, model, pack, tiny_shape};
use flamia_train::attention::Attention;
use flamia_train::model::{Model, ModelShape};
use flamia_train::optim::{AdamW, AdamWConfig};
use tch::Tensor;

const DOCUMENTS: [&[i64]; 4] = [&[1, 2, 3], &[4, 5, 6, 7, 8, 9, 10, 0, 1], &[], &[7]];

fn documents() -> Vec<Vec<i64>> {
    DOCUMENTS.iter().map(|tokens| tokens.to_vec()).collect()
}

fn logits(model: &Model, packed: &Packed, attention: &Attention) -> Tensor {
    let Packed {
        documents,
        tokens,
        positions,
        ..
    } = packed;
    model
        .forward(tokens, positions, documents, attention)
        .unwrap()
}

fn summed_loss(model: &Model, packed: &Packed, attention: &Attention) -> Tensor {
    let Packed {
        documents,
        tokens,
        labels,
        positions,
    } = packed;
    model
        .summed_loss(tokens, positions, labels, documents, attention)
        .unwrap()
}

/// The attentions that are exact up to rounding, each with a head dimension that it has.
const EXACT: [(&str, usize); 2] = [("sdpa", 6), ("reference", 64)];

#[test]
fn logits_are_those_of_the_plain_model() {
    for (name, head_dim) in EXACT {
        for (tied, heads, kv_heads) in [(false, 4, 2), (true, 4, 4), (true, 3, 1)] {
            let shape = ModelShape {
                tied,
                heads,
                kv_heads,
                head_dim,
                ..tiny_shape()
            };
            let model = model(shape, 1);
            let plain = PlainLlama::of(&model);
            let expected = documents()
                .into_iter()
                .flat_map(|tokens| plain.logits(&tokens));
            let expected: Vec<f64> = expected.flatten().collect();
            let found = floats(&logits(&model, &pack(&documents()), &attention(name)));
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error <= 2e-5 * (1.0 + expected.abs()),
                    "{name}, logit {i}: {found} not {expected}"
                );
            }
        }
    }
}

#[test]
fn gradients_are_the_plain_models_differences() {
    for (name, head_dim) in EXACT {
        let shape = ModelShape {
            head_dim,
            ..tiny_shape()
        };
        let model = model(shape, 2);
        let loss = summed_loss(&model, &pack(&documents()), &attention(name));
        loss.backward();

        let mut plain = PlainLlama::of(&model);
        let expected_loss = plain.summed_loss(&documents());
        assert!((loss.double_value(&[]) - expected_loss).abs() < 1e-4);

        for (param, tensor) in model.params.iter() {
            let grad = floats(&tensor.grad());
            // A few entries of every parameter, spread over it.
            for i in (0..grad.len()).step_by(grad.len() / 5) {
                let mut loss_at = |shift: f64| {
                    let saved = plain.weights[param][i];
                    plain.weights.get_mut(param).unwrap()[i] = saved + shift;
                    let loss = plain.summed_loss(&documents());
                    plain.weights.get_mut(param).unwrap()[i] = saved;
                    loss
                };
                let expected = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
                let error = (f64::from(grad[i]) - expected).abs();
                assert!(
                    error <= 1e-4 * (1.0 + expected.abs()),
                    "{name}, gradient {i} of {param}: {} not {expected}",
                    grad[i]
                );
            }
        }
    }
}

/// PCK-08: a copy of a document has the logits of the original wherever it lies.
#[test]
fn copies_of_a_document_have_its_logits() {
    // torch's matrix multiply may sum a row's products in another order when the row lies elsewhere
    // in its tile. Exact attention keeps that to a few roundings; a rounding that tips an E4M3 code
    // moves mxfp8's logits by up to a code's step.
    for (name, head_dim, tolerance) in [
        ("sdpa", 6, 1e-5),
        ("reference", 64, 1e-5),
        ("mxfp8", 64, 2e-2),
    ] {
        let attention = attention(name);
        let shape = ModelShape {
            vocab: 64,
            head_dim,
            ..tiny_shape()
        };
        let model = model(shape, 3);
        let document: Vec<i64> = (0..20).map(|t| (t * 7 + 3) % 64).collect();
        let shift = vec![5, 4, 3, 2, 1, 0, 6];
        let alone = floats(&logits(&model, &pack(from_ref(&document)), &attention));

        let packed = pack(&[shift, document.clone(), document.clone()]);
        let packed = floats(&logits(&model, &packed, &attention));
        let (first, second) = packed[7 * 64..].split_at(20 * 64);
        for (what, copy) in [("first", first), ("second", second)] {
            for (i, (copy, alone)) in copy.iter().zip(&alone).enumerate() {
                let error = (copy - alone).abs();
                assert!(
                    error <= tolerance * (1.0 + alone.abs()),
                    "{name}, {what} copy, logit {i}: {copy} not {alone}"
                );
            }
        }
        // Positions that went on counting would move the logits by far more than that.
        let mut counting = pack(from_ref(&document));
        counting.positions = &counting.positions * 3;
        let moved = floats(&logits(&model, &counting, &attention));
        let distance = moved.iter().zip(&alone).map(|(a, b)| (a - b).abs());
        let largest = distance.fold(0.0, f32::max);
        assert!(
            largest > 5.0 * tolerance,
            "{name}: positions move logits by {largest}"
        );
    }
}

/// PCK-10: a packed row's loss is the sum of its documents' losses.
#[test]
fn packing_adds_up() {
    let model = model(tiny_shape(), 4);
    let (a, b) = (vec![1, 2, 3], vec![4, 5, 6, 7, 8]);
    let loss = |documents: &[Vec<i64>]| {
        summed_loss(&model, &pack(documents), &CAUSAL_SDPA).double_value(&[])
    };
    let separate = loss(from_ref(&a)) + loss(from_ref(&b));
    let together = loss(&[a.clone(), b.clone()]);
    assert!(
        (separate - together).abs() < 1e-5 * separate,
        "{separate} alone, {together} packed"
    );
    // As one document, 3 would have to predict 4 and attention would see both.
    let joined = loss(&[[a, b].concat()]);
    assert!(
        (joined - together).abs() > 0.1,
        "{joined} joined, {together} packed"
    );
}

/// AUT-09: a step changes every projection of attention.
#[test]
fn attention_learns_through_all_its_projections() {
    for (name, head_dim) in [("sdpa", 6), ("reference", 64), ("mxfp8", 64)] {
        let shape = ModelShape {
            head_dim,
            ..tiny_shape()
        };
        let mut model = model(shape, 5);
        let before: Vec<_> = model
            .params
            .iter()
            .map(|(_, tensor)| floats(tensor))
            .collect();
        let config = AdamWConfig {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
        };
        let mut optimizer = AdamW::new(config, &model.params).unwrap();
        summed_loss(&model, &pack(&documents()), &attention(name)).backward();
        optimizer.update(&mut model.params, 1e-3).unwrap();
        for ((param, tensor), before) in model.params.iter().zip(&before) {
            let after = floats(tensor);
            let moved = before.iter().zip(&after).filter(|(a, b)| a != b).count();
            assert!(
                moved * 2 > before.len(),
                "{name}: {moved} entries of {param} moved"
            );
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error() {
    let model = model(tiny_shape(), 6);
    let Packed {
        documents,
        tokens,
        positions,
        ..
    } = pack(&[vec![1, 11]]);
    let outcome = model.forward(&tokens, &positions, &documents, &CAUSAL_SDPA);
    assert!(outcome.is_err());
}

#[test]
fn the_initial_weights_are_spread_as_asked() {
    let shape = ModelShape {
        dim: 64,
        ffn_dim: 256,
        vocab: 256,
        layers: 8,
        ..tiny_shape()
    };
    let params =
        flamia_train::model::Params::init(&shape.parameters(0.02), 0, tch::Device::Cpu).unwrap();
    let std = |name: &str| params.get(name).std(false).double_value(&[]);
    let residual = 0.02 / (2.0f64 * 8.0).sqrt();
    for (name, expected) in [
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.7.mlp.up_proj.weight", 0.02),
        ("model.layers.0.mlp.down_proj.weight", residual),
        ("model.layers.3.self_attn.o_proj.weight", residual),
        ("lm_head.weight", 0.02),
    ] {
        assert!(
            (std(name) / expected - 1.0).abs() < 0.05,
            "{name}: {}",
            std(name)
        );
    }
    assert!(
        floats(params.get("model.norm.weight"))
            .iter()
            .all(|&gain| gain == 1.0)
    );
}
