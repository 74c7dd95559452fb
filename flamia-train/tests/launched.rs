//! A step that nobody waits for does what one does that the host looks into. Here on the CPU, where
//! both can be had.
#![cfg(feature = "torch")]

mod common;

use common::{ADAMW, CAUSAL_SDPA, floats, labels, model, tiny_shape};
use flamia_train::batch::MicroBatch;
use flamia_train::model::Model;
use flamia_train::optim::AdamW;
use flamia_train::step::{LaunchedStep, launch_step};
use tch::Device;

/// A row of two documents, other ones for every `start`.
fn batch(start: i64) -> MicroBatch {
    let document = |len: i64, by: i64| (0..len).map(|t| (start + t * by) % 11).collect::<Vec<_>>();
    let documents = [document(5, 3), document(7, 2)];
    let row = datasets::Row {
        tokens: documents.concat(),
        labels: documents.iter().flat_map(|tokens| labels(tokens)).collect(),
        positions: documents
            .iter()
            .flat_map(|tokens| 0..tokens.len() as i64)
            .collect(),
        cu_seqlens: vec![0, 5, 12],
        padding: 0,
        bytes: 10,
    };
    MicroBatch::new(&[row], Device::Cpu).unwrap()
}

struct Run {
    model: Model,
    optimizer: AdamW,
}

impl Run {
    fn new(guarded: bool) -> Self {
        let model = model(tiny_shape(), 1);
        let mut optimizer = AdamW::new(ADAMW, &model.params).unwrap();
        assert!(!optimizer.is_guarded(), "the CPU's are not by themselves");
        if guarded {
            optimizer.guard();
        }
        Self { model, optimizer }
    }

    fn launch(&mut self, step: i64, lr: f64) -> LaunchedStep {
        let batches = [batch(step), batch(step + 5)];
        let Self { model, optimizer } = self;
        launch_step(model, optimizer, &batches, &CAUSAL_SDPA, lr, 1.0).unwrap()
    }

    fn weights(&self) -> Vec<f32> {
        let weights = self
            .model
            .params
            .iter()
            .flat_map(|(_, param)| floats(param));
        weights.collect()
    }
}

#[test]
fn guarded_steps_are_those_that_the_host_looks_into() {
    let (mut guarded, mut looked_into) = (Run::new(true), Run::new(false));
    for step in 0..5 {
        let [a, b] = [&mut guarded, &mut looked_into].map(|run| {
            let report = run.launch(step, 1e-2).read().unwrap();
            (report.loss, report.grad_norm)
        });
        assert_eq!((a.0.tokens, a.0.bytes), (24, 20));
        assert!((a.0.nats - b.0.nats).abs() < 1e-4, "{a:?} {b:?}");
        assert!((a.1 / b.1 - 1.0).abs() < 1e-4, "{a:?} {b:?}");
        // The gradient is long enough to be clipped.
        assert!(step > 0 || a.1 > 1.0, "{a:?}");
    }
    for (a, b) in guarded.weights().iter().zip(&looked_into.weights()) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

/// The bits of weights and moments.
fn bits(run: &Run) -> Vec<u32> {
    let Run { model, optimizer } = run;
    let moments = optimizer.tensors(&model.params);
    let weights = model.params.iter().map(|(_, param)| param);
    weights
        .chain(moments.iter().map(|(_, moment)| *moment))
        .flat_map(floats)
        .map(f32::to_bits)
        .collect()
}

#[test]
fn steps_that_are_not_finite_leave_every_bit_as_it_was() {
    for guarded in [true, false] {
        let mut run = Run::new(guarded);
        assert!(run.launch(0, 1e-2).read().unwrap().is_finite());
        // It is this step's update that spoils the weights: its own loss is fine.
        assert!(run.launch(1, 1e30).read().unwrap().is_finite());
        let before = bits(&run);
        let launched = [2, 3, 4].map(|step| run.launch(step, 1e-2));
        assert!(bits(&run) == before, "guarded: {guarded}");
        assert_eq!(run.optimizer.step_count(), 5);
        for step in launched {
            assert!(!step.read().unwrap().is_finite());
        }
    }
}

#[test]
fn training_goes_on_after_a_step_that_was_left_out() {
    for guarded in [true, false] {
        let mut run = Run::new(guarded);
        run.launch(0, 1e-2).read().unwrap();
        let before = bits(&run);
        let sound = run.model.params.get("model.norm.weight").copy();
        let mut gain = run.model.params.get("model.norm.weight").shallow_clone();
        tch::no_grad(|| drop(gain.fill_(f64::NAN)));
        assert!(!run.launch(1, 1e-2).read().unwrap().is_finite());
        tch::no_grad(|| gain.copy_(&sound));
        assert!(bits(&run) == before, "guarded: {guarded}");
        assert!(run.launch(2, 1e-2).read().unwrap().is_finite());
        assert!(bits(&run) != before);
    }
}
