//! Attention in torch's graph: against torch's own gradients, finite differences and itself.

mod common;

use std::sync::Arc;

use common::cosine;
use flamia_autograd::gradcheck::gradcheck;
use flamia_autograd::{AttentionError, FunctionError, attention};
use flamia_kernels::{Exponential, Mask, Options, Path, Profile, Stats};
use flamia_sched::Documents;
use tch::{Device, Kind, Tensor};

fn gaussian(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (kind, Device::Cpu))
}

/// q, k, v of a packed call, as leaves that want gradients.
fn leaves(rows: i64, [heads, kv_heads, head_dim]: [i64; 3], kind: Kind) -> [Tensor; 3] {
    [heads, kv_heads, kv_heads]
        .map(|heads| gaussian(&[rows, heads, head_dim], kind).set_requires_grad(true))
}

/// Gradients of `sum(o * d_o)`.
fn gradients(o: &Tensor, d_o: &Tensor, leaves: &[Tensor; 3]) -> Vec<Tensor> {
    let loss = (o * d_o).sum(Kind::Double);
    Tensor::run_backward(&[loss], &leaves.each_ref(), false, false)
}

/// torch's own attention, document by document, with the key/value heads repeated.
fn torch_attention([q, k, v]: &[Tensor; 3], documents: &Documents, mask: Mask) -> Tensor {
    let group = q.size()[1] / k.size()[1];
    let parts: Vec<Tensor> = documents
        .iter()
        .filter(|rows| !rows.is_empty())
        .map(|rows| {
            let cut = |x: &Tensor| {
                x.narrow(0, rows.start as i64, rows.len() as i64)
                    .transpose(0, 1)
                    .unsqueeze(0)
            };
            let repeat = |x: &Tensor| cut(x).repeat_interleave_self_int(group, 1, None);
            let causal = mask == Mask::Causal;
            Tensor::scaled_dot_product_attention(
                &cut(q),
                &repeat(k),
                &repeat(v),
                None::<Tensor>,
                0.0,
                causal,
                None,
                false,
            )
            .squeeze_dim(0)
            .transpose(0, 1)
        })
        .collect();
    Tensor::cat(&parts, 0)
}

#[test]
fn the_reference_path_passes_finite_differences() {
    tch::manual_seed(1);
    let documents = Documents::from_lengths(&[3, 0, 1, 2]).unwrap();
    for mask in [Mask::Causal, Mask::Full] {
        let inputs = leaves(6, [2, 1, 64], Kind::Double);
        let options = Options::new(Path::Reference, mask);
        // One output element in 64 is checked against every input element.
        let attend = |x: &[Tensor]| {
            attention(&x[0], &x[1], &x[2], &documents, &options, None)
                .map(|o| vec![o.narrow(2, 5, 1).copy()])
                .map_err(FunctionError::custom)
        };
        gradcheck(attend, &inputs, 1e-5, 1e-8, 1e-6).unwrap();
    }
}

#[test]
fn the_reference_path_agrees_with_torch() {
    tch::manual_seed(2);
    let documents = Documents::from_lengths(&[70, 1, 0, 33, 129]).unwrap();
    for shape in [[4, 2, 64], [3, 3, 128], [6, 1, 64]] {
        for mask in [Mask::Causal, Mask::Full] {
            let inputs = leaves(233, shape, Kind::Double);
            let [q, k, v] = &inputs;
            let options = Options::new(Path::Reference, mask);
            let o = attention(q, k, v, &documents, &options, None).unwrap();
            let expected = torch_attention(&inputs, &documents, mask);
            assert!(o.allclose(&expected, 1e-10, 1e-12, false));

            let d_o = gaussian(&o.size(), Kind::Double);
            let found = gradients(&o, &d_o, &inputs);
            let expected = gradients(&expected, &d_o, &inputs);
            for ((name, found), expected) in ["dq", "dk", "dv"].iter().zip(&found).zip(&expected) {
                assert!(
                    found.allclose(expected, 1e-9, 1e-11, false),
                    "{mask} {shape:?} {name}"
                );
            }
        }
    }
}

/// Within 0.001 of the numerics contract's cosines, through the graph, in every kind.
#[test]
fn mxfp8_is_close_to_the_reference_path() {
    tch::manual_seed(3);
    let documents = Documents::from_lengths(&[700, 324]).unwrap();
    for kind in [Kind::Float, Kind::BFloat16] {
        for profile in [Profile::BlockScaled, Profile::Hopper] {
            let inputs = leaves(1024, [2, 1, 128], kind);
            let [q, k, v] = &inputs;
            let options = Options {
                profile,
                ..Options::new(Path::Mxfp8, Mask::Causal)
            };
            let reference = Options::new(Path::Reference, Mask::Causal);
            let o = attention(q, k, v, &documents, &options, None).unwrap();
            let exact = attention(q, k, v, &documents, &reference, None).unwrap();
            assert_eq!((o.kind(), o.size()), (kind, q.size()));
            assert!(cosine(&o, &exact) > 0.9976);

            let d_o = gaussian(&o.size(), kind);
            let found = gradients(&o, &d_o, &inputs);
            let expected = gradients(&exact, &d_o, &inputs);
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.kind(), kind);
                assert!(
                    cosine(found, expected) > 0.9967,
                    "{}",
                    cosine(found, expected)
                );
            }
        }
    }
}

#[test]
fn a_document_is_the_same_alone_and_packed() {
    tch::manual_seed(4);
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    let lengths = [45, 130, 7];
    let documents = Documents::from_lengths(&lengths).unwrap();
    let inputs = leaves(182, [4, 2, 64], Kind::Float);
    let [q, k, v] = &inputs;
    let o = attention(q, k, v, &documents, &options, None).unwrap();
    let d_o = gaussian(&o.size(), Kind::Float);
    let packed = gradients(&o, &d_o, &inputs);
    for rows in documents.iter() {
        let cut = |x: &Tensor| x.narrow(0, rows.start as i64, rows.len() as i64);
        let alone = inputs
            .each_ref()
            .map(|x| cut(x).detach().copy().set_requires_grad(true));
        let single = Documents::single(rows.len()).unwrap();
        let [q, k, v] = &alone;
        let alone_o = attention(q, k, v, &single, &options, None).unwrap();
        assert!(alone_o.equal(&cut(&o)));
        let gradients = gradients(&alone_o, &cut(&d_o), &alone);
        for (alone, packed) in gradients.iter().zip(&packed) {
            assert!(alone.equal(&cut(packed)));
        }
    }
}

#[test]
fn strides_batches_and_repeated_inputs() {
    tch::manual_seed(5);
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    // [batch, heads, length, dim] storage, seen as [batch, length, heads, dim].
    let x = gaussian(&[2, 4, 50, 64], Kind::Float).set_requires_grad(true);
    let view = x.transpose(1, 2);
    assert!(!view.is_contiguous());
    let documents = Documents::batched(2, 50).unwrap();
    let o = attention(&view, &view, &view, &documents, &options, None).unwrap();
    assert_eq!(o.size(), [2, 50, 4, 64]);
    let flat = view.contiguous().reshape([100, 4, 64]);
    let packed = attention(&flat, &flat, &flat, &documents, &options, None).unwrap();
    assert!(o.reshape([100, 4, 64]).equal(&packed));

    // One tensor in three roles gets the sum of three gradients.
    let [q, k, v] = [0, 1, 2].map(|_| flat.detach().copy().set_requires_grad(true));
    let d_o = gaussian(&[100, 4, 64], Kind::Float);
    let apart = [&q, &k, &v];
    let o = attention(&q, &k, &v, &documents, &options, None).unwrap();
    let apart = Tensor::run_backward(&[(o * &d_o).sum(Kind::Float)], &apart, false, false);
    let sum = &apart[0] + &apart[1] + &apart[2];
    (packed * &d_o).sum(Kind::Float).backward();
    let together = x.grad().transpose(1, 2).reshape([100, 4, 64]);
    assert!(together.allclose(&sum, 1e-6, 1e-6, false));
}

#[test]
fn every_projection_learns_and_inference_keeps_nothing() {
    tch::manual_seed(6);
    let documents = Documents::single(40).unwrap();
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    let x = gaussian(&[40, 64], Kind::Float);
    let weights = [0; 4].map(|_| (gaussian(&[64, 64], Kind::Float) * 0.1).set_requires_grad(true));
    let forward = || {
        let [q, k, v] = [0, 1, 2].map(|i| x.matmul(&weights[i]).reshape([40, 1, 64]));
        let o = attention(&q, &k, &v, &documents, &options, None).unwrap();
        o.reshape([40, 64]).matmul(&weights[3])
    };
    let y = forward();
    assert!(y.requires_grad());
    y.square().sum(Kind::Float).backward();
    for weight in &weights {
        assert!(weight.grad().abs().max().double_value(&[]) > 0.0);
    }
    assert!(!tch::no_grad(forward).requires_grad());
}

#[test]
fn stats_count_both_passes() {
    tch::manual_seed(7);
    let inputs = leaves(300, [2, 2, 64], Kind::Float);
    let [q, k, v] = &inputs;
    let documents = Documents::single(300).unwrap();
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    let stats = Arc::new(Stats::default());
    let o = attention(q, k, v, &documents, &options, Some(&stats)).unwrap();
    assert_eq!(stats.snapshot().ds_nonzero, 0);
    let d_o = gaussian(&o.size(), Kind::Float);
    gradients(&o, &d_o, &inputs);
    let counts = stats.take();
    // Row 0 sees itself alone, where dS is zero but for rounding.
    let pairs = 2 * documents.visible_pairs(Mask::Causal);
    assert!(
        (pairs - 2..=pairs).contains(&counts.ds_nonzero),
        "{counts:?}"
    );
    assert!(counts.ds_flushed < counts.ds_nonzero / 100);
    assert_eq!(counts.saturated, 0);
}

#[test]
fn bad_calls_are_errors_that_say_so() {
    let documents = Documents::single(4).unwrap();
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    let x = gaussian(&[4, 2, 64], Kind::Float);
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor| {
        attention(q, k, v, &documents, &options, None).unwrap_err()
    };
    let half = x.to_kind(Kind::Half);
    assert!(matches!(
        refused(&half, &half, &half),
        AttentionError::Kind { found: Kind::Half }
    ));
    let message = refused(&x, &x.to_kind(Kind::BFloat16), &x).to_string();
    assert!(
        message.starts_with("k is BFloat16 on Cpu, but q is Float on Cpu"),
        "{message}"
    );
    assert!(matches!(
        refused(&x, &x.unsqueeze(0), &x),
        AttentionError::Rank { tensor: "k", .. }
    ));
    assert!(matches!(
        refused(&x, &x, &x.narrow(0, 0, 3)),
        AttentionError::Call(flamia_kernels::AttentionError::Shape { tensor: "v", .. })
    ));
    assert!(matches!(
        refused(&x.narrow(1, 0, 1), &x, &x),
        AttentionError::Call(flamia_kernels::AttentionError::Heads {
            heads: 1,
            kv_heads: 2
        })
    ));
    let long = Documents::single(5).unwrap();
    let message = attention(&x, &x, &x, &long, &options, None)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("documents cover 5 rows, but the tensors have 4"),
        "{message}"
    );
}

#[test]
fn a_second_derivative_is_refused() {
    let x = gaussian(&[4, 1, 64], Kind::Double).set_requires_grad(true);
    let documents = Documents::single(4).unwrap();
    let options = Options::new(Path::Reference, Mask::Causal);
    let o = attention(&x, &x, &x, &documents, &options, None).unwrap();
    let loss = o.sum(Kind::Double);
    let error = Tensor::f_run_backward(&[&loss], &[&x], true, true)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("attention has no second derivative"),
        "{error}"
    );
}

#[test]
fn nan_poisons_its_own_document_alone() {
    let q = gaussian(&[80, 1, 64], Kind::Float);
    let poisoned = q.copy();
    let _ = poisoned.get(50).get(0).get(7).fill_(f64::NAN);
    let documents = Documents::from_lengths(&[40, 40]).unwrap();
    let options = Options::new(Path::Mxfp8, Mask::Causal);
    let clean = attention(&q, &q, &q, &documents, &options, None).unwrap();
    let found = attention(&poisoned, &q, &q, &documents, &options, None).unwrap();
    assert!(found.narrow(0, 0, 40).equal(&clean.narrow(0, 0, 40)));
    // Row 50 is row 10 of its document: its block of 32 is NaN, the rest of the document is not.
    assert!(bool::try_from(found.narrow(0, 40, 32).isnan().all()).unwrap());
    assert!(found.narrow(0, 72, 8).equal(&clean.narrow(0, 72, 8)));
}

#[test]
fn an_exponential_for_inference_is_refused_where_a_gradient_could_be_asked_for() {
    tch::manual_seed(8);
    let documents = Documents::single(80).unwrap();
    let stats = Arc::new(Stats::default());
    for (path, exponential) in [
        (Path::Mxfp8, Exponential::Schraudolph),
        (Path::Nvfp4, Exponential::Schraudolph),
        (Path::Fp4, Exponential::MitchellP),
    ] {
        let options = Options {
            exponential,
            ..Options::new(path, Mask::Causal)
        };
        let attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
            attention(q, k, v, &documents, &options, Some(&stats))
        };
        let plain = [0; 3].map(|_| gaussian(&[80, 1, 64], Kind::Float));
        for wanted in 0..3 {
            let mut inputs = plain.each_ref().map(Tensor::shallow_clone);
            inputs[wanted] = inputs[wanted].copy().set_requires_grad(true);
            let [q, k, v] = &inputs;
            let error = attend(q, k, v).unwrap_err();
            assert!(
                matches!(
                    error,
                    AttentionError::Call(flamia_kernels::AttentionError::InferenceOnly {
                        exponential: refused
                    }) if refused == exponential
                ),
                "{error}"
            );
            assert!(error.to_string().contains("for inference only"), "{error}");
            // Nothing was computed, so nothing was counted.
            assert_eq!(stats.snapshot(), Stats::default().snapshot());
            // Without gradients the same call is inference.
            let o = tch::no_grad(|| attend(q, k, v)).unwrap();
            let [q, k, v] = &plain;
            assert!(o.equal(&attend(q, k, v).unwrap()));
            stats.take();
        }
    }
}

/// Every low-bit path and a sliding window, through the graph.
#[test]
fn low_bit_paths_differentiate_under_every_mask() {
    tch::manual_seed(9);
    let documents = Documents::from_lengths(&[150, 1, 90]).unwrap();
    for (path, closest) in [(Path::Mxfp8, 0.99), (Path::Nvfp4, 0.97), (Path::Fp4, 0.9)] {
        for mask in [Mask::Causal, Mask::Full, Mask::window(40)] {
            let inputs = leaves(241, [2, 1, 128], Kind::Float);
            let [q, k, v] = &inputs;
            let attend =
                |path| attention(q, k, v, &documents, &Options::new(path, mask), None).unwrap();
            let (o, exact) = (attend(path), attend(Path::Reference));
            let d_o = gaussian(&o.size(), Kind::Float);
            let found = gradients(&o, &d_o, &inputs);
            let expected = gradients(&exact, &d_o, &inputs);
            for (found, expected) in found.iter().zip(&expected).chain([(&o, &exact)]) {
                let cosine = cosine(found, expected);
                assert!(cosine > closest, "{path} {mask}: {cosine}");
            }
        }
    }
}
