//! Cross-entropy in chunks is cross-entropy.
#![cfg(feature = "torch")]

mod common;

use common::{CAUSAL_SDPA, Packed, floats, model, pack, tiny_shape};
use flamia_train::cross_entropy::chunked_cross_entropy;
use proptest::prelude::*;
use tch::{Device, Kind, Reduction, Tensor};

fn draw(shape: [i64; 2]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

/// Loss and gradients, the loss weighed by 3 as an outer function would.
fn outcome(loss: Tensor, hidden: &Tensor, head: &Tensor) -> [Tensor; 3] {
    let loss: Tensor = loss * 3.0;
    let mut gradients = Tensor::run_backward(&[&loss], &[hidden, head], false, false);
    let d_head = gradients.swap_remove(1);
    [loss.detach(), gradients.swap_remove(0), d_head]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn losses_and_gradients_are_torchs(
        tokens in 1i64..40, vocab in 2i64..30, dim in 1i64..9, chunk in 1i64..50, seed in 0i64..1000,
    ) {
        tch::manual_seed(seed);
        let (hidden, head) = (draw([tokens, dim]), draw([vocab, dim]));
        // Every label is one in two ignored.
        let labels = Tensor::randint(vocab, [tokens], (Kind::Int64, Device::Cpu));
        let labelled = Tensor::rand([tokens], (Kind::Float, Device::Cpu)).gt(0.5);
        let labels = labels.where_self(&labelled, &Tensor::from(-100i64));
        let plain = hidden.matmul(&head.tr()).cross_entropy_loss(
            &labels, None::<&Tensor>, Reduction::Sum, -100, 0.0,
        );
        let chunked = chunked_cross_entropy(&hidden, &head, &labels, chunk).unwrap();
        let plain = outcome(plain, &hidden, &head);
        for (found, wanted) in outcome(chunked, &hidden, &head).iter().zip(&plain) {
            // Softmax and sums are in FP32.
            prop_assert_eq!(found.size(), wanted.size());
            let error = (found.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]);
            prop_assert!(error < 1e-4, "{error}");
        }
    }
}

#[test]
fn a_models_gradients_do_not_depend_on_the_chunk() {
    for tied in [false, true] {
        let gradients = |chunk| {
            let mut shape = tiny_shape();
            shape.tied = tied;
            let mut model = model(shape, 1);
            model.loss_chunk = chunk;
            let Packed {
                documents,
                tokens,
                labels,
                positions,
            } = pack(&[vec![1, 2, 3, 4, 5], vec![6, 7, 8, 9]]);
            let loss = model
                .summed_loss(&tokens, &positions, &labels, &documents, &CAUSAL_SDPA)
                .unwrap();
            loss.backward();
            let grads = model.params.iter().flat_map(|(_, p)| floats(&p.grad()));
            (loss.double_value(&[]), grads.collect::<Vec<_>>())
        };
        let (plain_loss, plain) = gradients(0);
        for chunk in [1, 4, 8] {
            let (loss, chunked) = gradients(chunk);
            assert!((loss - plain_loss).abs() < 1e-4, "{loss} {plain_loss}");
            for (chunked, plain) in chunked.iter().zip(&plain) {
                assert!((chunked - plain).abs() < 1e-4, "{chunked} {plain}");
            }
        }
    }
}
