//! Products in BF16 from FP32 weights: near FP32, and as repeatable.
#![cfg(feature = "torch")]

mod common;

use std::fs;

use common::run::{Workplace, args, saved_tensors, summary, train};
use common::{ADAMW, CAUSAL_SDPA, Packed, floats, model, pack, tiny_shape};
use flamia_train::model::{Model, Precision};
use flamia_train::optim::{AdamW, Guard, norm_on_device};
use tch::Kind;

fn packed() -> Packed {
    pack(&[vec![1, 2, 3, 4, 5], vec![6, 7, 8, 9, 10, 0, 1]])
}

fn loss(model: &Model) -> tch::Tensor {
    let Packed {
        documents,
        tokens,
        labels,
        positions,
    } = packed();
    model
        .summed_loss(&tokens, &positions, &labels, &documents, &CAUSAL_SDPA)
        .unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn losses_and_gradients_are_near_those_of_fp32() {
    for (tied, chunk) in [(false, 0), (true, 0), (true, 5)] {
        let run = |precision| {
            let mut shape = tiny_shape();
            shape.tied = tied;
            let mut model = model(shape, 1);
            model.precision = precision;
            model.loss_chunk = chunk;
            let loss = loss(&model);
            assert_eq!(loss.kind(), Kind::Float);
            loss.backward();
            let grads = model.params.iter().map(|(name, param)| {
                assert_eq!(param.grad().kind(), Kind::Float, "{name}");
                (name.to_string(), floats(&param.grad()))
            });
            (loss.double_value(&[]), grads.collect::<Vec<_>>())
        };
        let ((found_loss, found), (loss, wanted)) = (run(Precision::Bf16), run(Precision::Fp32));
        assert_ne!(found_loss, loss);
        assert!(
            (found_loss / loss - 1.0).abs() < 0.02,
            "{found_loss} {loss}"
        );
        for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
            let cosine = cosine(found, wanted);
            assert!(cosine > 0.99, "{name}: {cosine}");
        }
    }
}

#[test]
fn no_outdated_copy_of_a_weight_is_used() {
    for guarded in [false, true] {
        let mut trained = model(tiny_shape(), 1);
        trained.precision = Precision::Bf16;
        let mut optimizer = AdamW::new(ADAMW, &trained.params).unwrap();
        let first = loss(&trained);
        first.backward();
        if guarded {
            let norm = norm_on_device(&trained.params).unwrap();
            let guard = Guard::new(&first.to_kind(Kind::Double), &norm, 1.0).unwrap();
            let update = optimizer.update_guarded(&mut trained.params, 1e-2, &guard);
            update.unwrap();
        } else {
            optimizer.update(&mut trained.params, 1e-2).unwrap();
        }
        let second = loss(&trained).double_value(&[]);
        assert_ne!(second, first.double_value(&[]));

        // The same weights in a model that has made no copies yet.
        let mut fresh = model(tiny_shape(), 2);
        fresh.precision = Precision::Bf16;
        tch::no_grad(|| {
            for ((_, to), (_, from)) in fresh.params.iter_mut().zip(trained.params.iter()) {
                to.copy_(from);
            }
        });
        assert_eq!(loss(&fresh).double_value(&[]), second, "guarded: {guarded}");
    }
}

#[test]
fn a_run_in_bf16_learns_as_in_fp32_and_resumes_with_the_same_bits() {
    let workplace = Workplace::new();
    let run = |name: &str, more: &str| {
        let flags =
            format!("--steps 12 --optim-lr 1e-2 --checkpoint-every 5 --checkpoint-keep 9 {more}");
        train(&args(&workplace.data, &workplace.run(name), &flags)).unwrap();
        summary(&workplace.run(name))["val_loss"].as_f64().unwrap()
    };
    let (bf16, fp32) = (run("bf16", "--compute-precision bf16"), run("fp32", ""));
    assert_ne!(bf16, fp32);
    assert!((bf16 - fp32).abs() < 0.05, "{bf16} {fp32}");

    // As if it had been killed after its fifth step.
    let (whole, resumed) = (workplace.run("bf16"), workplace.run("resumed"));
    let checkpoint = "checkpoints/step-000005";
    fs::create_dir_all(resumed.join(checkpoint)).unwrap();
    fs::copy(whole.join("settings.toml"), resumed.join("settings.toml")).unwrap();
    for entry in fs::read_dir(whole.join(checkpoint)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(
            entry.path(),
            resumed.join(checkpoint).join(entry.file_name()),
        )
        .unwrap();
    }
    assert_eq!(run("resumed", "--compute-precision bf16 --resume"), bf16);
    assert!(saved_tensors(&resumed, 12) == saved_tensors(&whole, 12));
}
