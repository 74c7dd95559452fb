//! TRN-04: a saved step continues as if nothing had happened; weights alone do not.
#![cfg(feature = "torch")]

mod common;

use common::{ADAMW, CAUSAL_SDPA, Packed, floats, model, pack, tiny_shape};
use flamia_train::checkpoint::{Checkpoints, TrainState};
use flamia_train::model::Model;
use flamia_train::optim::{AdamW, clip_global_norm};
use flamia_train::schedule::Schedule;
use flamia_train::step::accumulate;

const SCHEDULE: Schedule = Schedule {
    peak: 1e-2,
    warmup: 3,
    steps: 8,
    min_ratio: 0.1,
};

/// The two micro-batches of a step, different in every step.
fn micro_batches(step: u64) -> [Packed; 2] {
    let tokens = |start: u64, len: u64| (start..start + len).map(|t| (t * t % 11) as i64).collect();
    [
        pack(&[tokens(step, 5), tokens(3 * step + 1, 2)]),
        pack(&[tokens(7 * step, 9)]),
    ]
}

struct Run {
    model: Model,
    optimizer: AdamW,
}

impl Run {
    fn new(seed: u64) -> Self {
        let model = model(tiny_shape(), seed);
        let optimizer = AdamW::new(ADAMW, &model.params).unwrap();
        Self { model, optimizer }
    }

    fn step(&mut self, step: u64) {
        self.model.params.zero_grad();
        let model = &self.model;
        let nats = accumulate(&micro_batches(step), 4 + 1 + 8, |packed| {
            let Packed {
                documents,
                tokens,
                labels,
                positions,
            } = packed;
            Ok(model.summed_loss(tokens, positions, labels, documents, &CAUSAL_SDPA)?)
        });
        assert!(nats.unwrap().double_value(&[]).is_finite());
        clip_global_norm(&self.model.params, 1.0).unwrap();
        self.optimizer
            .update(&mut self.model.params, SCHEDULE.lr(step))
            .unwrap();
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        self.model
            .params
            .iter()
            .map(|(_, tensor)| floats(tensor))
            .collect()
    }

    fn moments(&self) -> Vec<Vec<f32>> {
        self.optimizer
            .tensors(&self.model.params)
            .iter()
            .map(|(_, t)| floats(t))
            .collect()
    }
}

#[test]
fn one_more_step_is_the_same_after_resuming_and_another_from_cold() {
    let run_folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(run_folder.path(), 1).unwrap();
    let mut uninterrupted = Run::new(1);
    (0..5).for_each(|step| uninterrupted.step(step));
    let state = common::state(5);
    let saved = checkpoints
        .save(
            &state,
            &uninterrupted.model.params,
            &uninterrupted.optimizer,
        )
        .unwrap();

    // Both start from other weights, which loading must replace.
    let mut resumed = Run::new(2);
    let found: TrainState =
        Checkpoints::load(&saved, &resumed.model.params, &mut resumed.optimizer).unwrap();
    assert_eq!(found, state);
    assert_eq!(resumed.optimizer.step_count(), 5);
    let mut cold = Run::new(3);
    Checkpoints::load(&saved, &cold.model.params, &mut cold.optimizer).unwrap();
    cold.optimizer = AdamW::new(ADAMW, &cold.model.params).unwrap();
    assert_eq!(cold.weights(), uninterrupted.weights());

    for run in [&mut uninterrupted, &mut resumed, &mut cold] {
        run.step(5);
    }
    assert_eq!(resumed.weights(), uninterrupted.weights());
    assert_eq!(resumed.moments(), uninterrupted.moments());
    assert_ne!(cold.weights(), uninterrupted.weights());
}
