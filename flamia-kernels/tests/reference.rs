//! The `reference` path against float64.

mod common;

use common::*;
use flamia_kernels::{Mask, Options, Path};
use half::bf16;

/// Heads, key/value heads and head dimension.
const SHAPES: [[usize; 3]; 6] = [
    [1, 1, 64],
    [1, 1, 128],
    [4, 2, 64],
    [6, 2, 64],
    [7, 1, 64],
    [3, 3, 128],
];

#[test]
fn agrees_with_the_oracle_on_documents_of_every_kind() {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let mut rng = rng(seed as u64);
        let lengths: Vec<usize> = (0..4).map(|_| edgy_length(&mut rng)).collect();
        let problem = Problem::gaussian(&lengths, shape, &mut rng);
        for mask in [Mask::Causal, Mask::Full] {
            let options = Options::new(Path::Reference, mask);
            let expected = oracle(&problem, mask);
            let f64s = compute::<f64>(&problem, &options);
            let f32s = compute::<f32>(&problem, &options);
            let bf16s = compute::<bf16>(&problem, &options);
            let context = format!("{lengths:?} {shape:?} {mask}");
            assert!(
                relative_error(&f64s.lse, &expected.lse) < 1e-14,
                "{context}: lse"
            );
            assert!(
                relative_error(&f32s.lse, &expected.lse) < 1e-6,
                "{context}: lse"
            );
            for i in 0..4 {
                let (name, expected) = expected.tensors()[i];
                let check = |found: &[f64], bound: f64| {
                    let error = relative_error(found, expected);
                    assert!(error < bound, "{context}: {name} differs by {error:e}");
                };
                check(f64s.tensors()[i].1, 1e-13);
                check(f32s.tensors()[i].1, 3e-6);
                // O is stored in BF16 and read again for D.
                check(bf16s.tensors()[i].1, 1e-2);
            }
        }
    }
}

#[test]
fn gradients_sum_over_a_group_of_query_heads() {
    for (heads, kv_heads) in [
        (4, 4),
        (4, 2),
        (8, 2),
        (6, 2),
        (12, 3),
        (8, 1),
        (14, 2),
        (7, 7),
    ] {
        let problem = Problem::gaussian(&[40, 9], [heads, kv_heads, 64], &mut rng(heads as u64));
        let expected = oracle(&problem, Mask::Causal);
        let found = compute::<f64>(&problem, &Options::new(Path::Reference, Mask::Causal));
        for ((name, found), (_, expected)) in found.tensors().into_iter().zip(expected.tensors()) {
            let error = relative_error(found, expected);
            assert!(
                error < 1e-13,
                "{heads}/{kv_heads}: {name} differs by {error:e}"
            );
        }
    }
}

/// Scores of several hundred nats, as trained models have them.
#[test]
fn survives_a_wide_range_of_scores() {
    let mut problem = Problem::gaussian(&[200], [1, 1, 64], &mut rng(1));
    problem.q.iter_mut().for_each(|x| *x *= 64.0);
    for mask in [Mask::Causal, Mask::Full] {
        let expected = oracle(&problem, mask);
        let found = compute::<f32>(&problem, &Options::new(Path::Reference, mask));
        assert!(expected.lse.iter().any(|lse| *lse > 100.0));
        assert!(relative_error(&found.o, &expected.o) < 1e-4);
        assert!(cosine(&found.dq, &expected.dq) > 0.9999);
    }
}
