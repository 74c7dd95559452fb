//! TRN-01: every label of a step weighs the same, in whichever micro-batch it lies.
#![cfg(feature = "torch")]

mod common;

use std::slice::from_ref;

use common::{CAUSAL_SDPA, Packed, floats, model, pack, tiny_shape};
use flamia_train::step::{StepError, accumulate};
use tch::{Kind, Tensor};

/// Micro-batches as (labels, loss per label), of which the loss is a multiple of one weight.
fn loss_and_gradient(batches: &[&[(u64, f64)]]) -> (f64, f64) {
    let weight = Tensor::from(1f32).set_requires_grad(true);
    let labels = batches
        .iter()
        .copied()
        .flatten()
        .map(|(labels, _)| labels)
        .sum();
    let total = accumulate(batches, labels, |batch| {
        let nats: f64 = batch
            .iter()
            .map(|&(labels, loss)| labels as f64 * loss)
            .sum();
        Ok(&weight * nats)
    });
    (
        total.unwrap().double_value(&[]) / labels as f64,
        weight.grad().double_value(&[]),
    )
}

#[test]
fn five_labels_of_loss_one_and_one_of_loss_seven_make_two() {
    let (five, one) = ((5, 1.0), (1, 7.0));
    for batches in [
        &[&[five][..], &[one]][..],
        &[&[five, one]],
        &[&[one], &[five]],
    ] {
        let (loss, gradient) = loss_and_gradient(batches);
        assert!((loss - 2.0).abs() < 1e-6, "{batches:?}: loss {loss}");
        assert!(
            (gradient - 2.0).abs() < 1e-6,
            "{batches:?}: gradient {gradient}"
        );
    }
}

#[test]
fn splitting_a_step_leaves_the_models_gradient() {
    let (long, short) = (vec![1, 2, 3, 4, 5, 6], vec![7, 8]);
    let gradient = |steps: &[Packed]| {
        let model = model(tiny_shape(), 1);
        let loss = accumulate(steps, 6, |packed| {
            let Packed {
                documents,
                tokens,
                labels,
                positions,
            } = packed;
            Ok(model.summed_loss(tokens, positions, labels, documents, &CAUSAL_SDPA)?)
        });
        let grads = model
            .params
            .iter()
            .flat_map(|(_, param)| floats(&param.grad()));
        (loss.unwrap().double_value(&[]), grads.collect::<Vec<_>>())
    };
    let (loss, split) = gradient(&[pack(from_ref(&long)), pack(from_ref(&short))]);
    let (whole_loss, whole) = gradient(&[pack(&[long, short])]);
    assert!((loss - whole_loss).abs() < 1e-4);
    let largest = whole.iter().fold(0f32, |largest, g| largest.max(g.abs()));
    for (split, whole) in split.iter().zip(&whole) {
        assert!(
            (split - whole).abs() <= 1e-5 * largest,
            "{split} split, {whole} whole"
        );
    }
}

#[test]
fn a_step_without_labels_is_refused() {
    let outcome = accumulate(&[()], 0, |()| {
        Ok(Tensor::zeros([], (Kind::Float, tch::Device::Cpu)))
    });
    assert!(matches!(outcome, Err(StepError::NoLabels)));
}
