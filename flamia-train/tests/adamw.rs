//! AdamW and clipping against torch's own numbers (oracles/adamw.py).
#![cfg(feature = "torch")]

mod common;

use common::floats;
use flamia_train::model::{Init, ParamSpec, Params};
use flamia_train::optim::{
    AdamW, AdamWConfig, Guard, clip_global_norm, global_norm, norm_on_device,
};
use serde::Deserialize;
use tch::{Device, Tensor, no_grad};

#[derive(Deserialize)]
struct Oracle {
    start: Values,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    lr: f64,
    grad: Values,
    after: Values,
    exp_avg: Values,
    exp_avg_sq: Values,
}

#[derive(Deserialize)]
struct Values {
    matrix: Vec<f32>,
    vector: Vec<f32>,
}

impl Values {
    fn of(&self, name: &str) -> &[f32] {
        match name {
            "matrix" => &self.matrix,
            _ => &self.vector,
        }
    }
}

fn params() -> Params {
    let spec = |name: &str, shape: &[i64]| ParamSpec {
        name: name.into(),
        shape: shape.into(),
        init: Init::Ones,
    };
    Params::init(
        &[spec("matrix", &[3, 4]), spec("vector", &[5])],
        0,
        Device::Cpu,
    )
    .unwrap()
}

fn set(tensor: &mut Tensor, values: &[f32]) {
    no_grad(|| tensor.copy_(&Tensor::from_slice(values).reshape(tensor.size())));
}

/// Gives every parameter a gradient tensor, with the values that `of` says.
fn set_grads(params: &mut Params, of: impl Fn(&str) -> Vec<f32>) {
    for (name, param) in params.iter_mut() {
        if !param.grad().defined() {
            param.sum(tch::Kind::Float).backward();
        }
        set(&mut param.grad(), &of(name));
    }
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= 2e-6 * expected.abs() + 1e-12,
            "{what}[{i}]: {found} not {expected}"
        );
    }
}

const CONFIG: AdamWConfig = AdamWConfig {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
};

/// Holds an update, given the optimiser, the parameters and a learning rate, against the oracle.
fn follows_the_oracle(update: impl Fn(&mut AdamW, &mut Params, f64)) {
    let oracle: Oracle = serde_json::from_str(include_str!("oracles/adamw.json")).unwrap();
    let mut params = params();
    for (name, param) in params.iter_mut() {
        set(param, oracle.start.of(name));
    }
    let mut optimizer = AdamW::new(CONFIG, &params).unwrap();
    for (i, step) in oracle.steps.iter().enumerate() {
        set_grads(&mut params, |name| step.grad.of(name).to_vec());
        update(&mut optimizer, &mut params, step.lr);
        for (name, param) in params.iter() {
            assert_close(
                &format!("step {i} {name}"),
                &floats(param),
                step.after.of(name),
            );
        }
        for (name, moment) in optimizer.tensors(&params) {
            let expected = match name.split_once('.').unwrap() {
                ("exp_avg", param) => step.exp_avg.of(param),
                (_, param) => step.exp_avg_sq.of(param),
            };
            assert_close(&format!("step {i} {name}"), &floats(moment), expected);
        }
    }
    assert_eq!(optimizer.step_count(), 5);
}

/// What a device is told that clips to `max_norm` after a loss.
fn guard(params: &Params, loss: f64, max_norm: f64) -> Guard {
    Guard::new(
        &Tensor::from(loss),
        &norm_on_device(params).unwrap(),
        max_norm,
    )
    .unwrap()
}

#[test]
fn updates_are_torchs() {
    follows_the_oracle(|optimizer, params, lr| optimizer.update(params, lr).unwrap());
}

#[test]
fn guarded_updates_are_torchs() {
    follows_the_oracle(|optimizer, params, lr| {
        let guard = guard(params, 1.0, f64::MAX);
        optimizer.update_guarded(params, lr, &guard).unwrap();
    });
}

#[test]
fn a_guarded_update_is_clipped_as_one_that_the_host_looks_at() {
    let run = |guarded: bool| {
        let mut params = params();
        let mut optimizer = AdamW::new(CONFIG, &params).unwrap();
        // The second one is below the bound.
        for size in [3.0, 0.1] {
            set_grads(&mut params, |name| {
                vec![size; if name == "matrix" { 12 } else { 5 }]
            });
            if guarded {
                let guard = guard(&params, 1.0, 2.0);
                optimizer.update_guarded(&mut params, 1e-2, &guard).unwrap();
            } else {
                clip_global_norm(&params, 2.0).unwrap();
                optimizer.update(&mut params, 1e-2).unwrap();
            }
        }
        let moments = optimizer.tensors(&params);
        let moments: Vec<f32> = moments
            .iter()
            .flat_map(|(_, moment)| floats(moment))
            .collect();
        (floats(params.get("matrix")), moments)
    };
    let ((found, found_moments), (wanted, wanted_moments)) = (run(true), run(false));
    assert_close("matrix", &found, &wanted);
    assert_close("moments", &found_moments, &wanted_moments);
}

#[test]
fn what_is_not_finite_changes_nothing() {
    let mut params = params();
    let mut optimizer = AdamW::new(CONFIG, &params).unwrap();
    let mut step = |loss: f64, gradient: f32| {
        set_grads(&mut params, |name| match name {
            "matrix" => vec![0.5; 12],
            _ => vec![0.5, gradient, 0.5, 0.5, 0.5],
        });
        let guard = guard(&params, loss, 1.0);
        optimizer.update_guarded(&mut params, 1e-2, &guard).unwrap();
        let moments = optimizer.tensors(&params);
        let moments: Vec<f32> = moments
            .iter()
            .flat_map(|(_, moment)| floats(moment))
            .collect();
        let weights = params
            .iter()
            .flat_map(|(_, param)| floats(param))
            .collect::<Vec<_>>();
        (weights, moments)
    };
    let before = step(1.0, 0.5);
    for (loss, gradient) in [(1.0, f32::NAN), (1.0, f32::INFINITY), (f64::NAN, 0.5)] {
        assert_eq!(step(loss, gradient), before);
    }
    assert_ne!(step(1.0, 0.5).0, before.0);
    assert_eq!(optimizer.step_count(), 5, "left out or not");
}

#[test]
fn clipping_scales_the_whole_gradient_to_the_norm() {
    let mut params = params();
    // 12 entries of 3 and 5 of -4: norm sqrt(12 * 9 + 5 * 16) = sqrt(188).
    let grads = |name: &str| {
        if name == "matrix" {
            vec![3.0; 12]
        } else {
            vec![-4.0; 5]
        }
    };
    set_grads(&mut params, grads);
    let norm = clip_global_norm(&params, 20.0).unwrap();
    assert!((norm - 188f64.sqrt()).abs() < 1e-5);
    assert_eq!(
        floats(&params.get("matrix").grad()),
        vec![3.0; 12],
        "below the bound: untouched"
    );

    let norm = clip_global_norm(&params, 1.0).unwrap();
    assert!(
        (norm - 188f64.sqrt()).abs() < 1e-5,
        "the norm before clipping is reported"
    );
    assert!((global_norm(&params).unwrap() - 1.0).abs() < 1e-6);
    assert_close(
        "vector",
        &floats(&params.get("vector").grad()),
        &[-4.0 / 188f32.sqrt(); 5],
    );
}

#[test]
fn a_norm_that_is_no_number_is_reported_and_scales_nothing() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut params = params();
        set_grads(&mut params, |name| match name {
            "matrix" => vec![3.0; 12],
            _ => vec![1.0, bad, 1.0, 1.0, 1.0],
        });
        assert!(!clip_global_norm(&params, 1.0).unwrap().is_finite());
        assert_eq!(floats(&params.get("matrix").grad()), vec![3.0; 12]);
    }
}
