//! What a later position can do to an earlier result.

mod common;

use std::ops::Range;

use common::*;
use flamia_kernels::{
    DqAccumulator, DsExponent, Mask, Normaliser, OperandScales, Options, Path, ValueScales,
};
use flamia_sched::BLOCK;
use half::bf16;
use rand::{Rng, RngExt};

const LOW_BIT: [Path; 3] = [Path::Mxfp8, Path::Nvfp4, Path::Fp4];

/// Which operands of one position are changed.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// Row of the packed tensors.
    row: usize,
    /// q, k, v, d_o.
    tensors: [bool; 4],
}

impl Change {
    fn random(problem: &Problem, rng: &mut impl Rng) -> Self {
        let mut tensors: [bool; 4] = rng.random();
        tensors[rng.random_range(0..4)] = true;
        Self {
            row: rng.random_range(0..problem.rows()),
            tensors,
        }
    }

    /// Grows, shrinks, replaces or poisons the operands at the position.
    fn apply(&self, problem: &Problem, rng: &mut impl Rng) -> Problem {
        let mut changed = problem.clone();
        let (heads, kv_heads, dim) = (problem.heads, problem.kv_heads, problem.head_dim);
        let operands = [
            (&mut changed.q, heads),
            (&mut changed.k, kv_heads),
            (&mut changed.v, kv_heads),
            (&mut changed.d_o, heads),
        ];
        for ((x, heads), _) in operands.into_iter().zip(self.tensors).filter(|(_, on)| *on) {
            let row = &mut x[self.row * heads * dim..(self.row + 1) * heads * dim];
            match rng.random_range(0..5) {
                0 => row.fill(0.0),
                1 => row.fill(f64::NAN),
                2 => row[rng.random_range(0..dim)] = f64::INFINITY,
                3 => row.iter_mut().for_each(|x| *x = to_bf16(-*x * 1.5)),
                _ => {
                    let factor = f64::from(rng.random_range(-20..20)).exp2();
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
        }
        changed
    }
}

/// Asserts that `rows` of a `[rows, heads, head_dim]` tensor are the same to the bit.
fn assert_same(name: &str, a: &[f64], b: &[f64], token: usize, rows: Range<usize>, context: &str) {
    let [a, b] = [a, b].map(|x| &x[rows.start * token..rows.end * token]);
    let first = a
        .iter()
        .zip(b)
        .position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(
        first.map(|i| rows.start + i / token),
        None,
        "{name} of an untouched row changed: {context}"
    );
}

/// Checks that everything which causality and document borders keep from `change` kept its bits.
fn assert_untouched(
    problem: &Problem,
    before: &Results,
    after: &Results,
    change: Change,
    context: &str,
) {
    let context = &format!("{change:?}, {context}");
    let query_token = problem.heads * problem.head_dim;
    let key_token = problem.kv_heads * problem.head_dim;
    for document in problem.documents.iter() {
        let hit = document.contains(&change.row);
        // Earlier queries of the document; all of the others'.
        let queries = document.start..if hit { change.row } else { document.end };
        assert_same(
            "o",
            &before.o,
            &after.o,
            query_token,
            queries.clone(),
            context,
        );
        assert_same(
            "dq",
            &before.dq,
            &after.dq,
            query_token,
            queries.clone(),
            context,
        );
        for head in 0..problem.heads {
            let offset = head * problem.rows();
            let rows = offset + queries.start..offset + queries.end;
            assert_same("lse", &before.lse, &after.lse, 1, rows, context);
        }
        // A key's gradient sums over itself and later queries: it knows nothing of earlier ones. But
        // a changed key or value changes the softmax of all queries that see it.
        let keys = if !hit {
            document.clone()
        } else if change.tensors[1] || change.tensors[2] {
            document.end..document.end
        } else {
            change.row + 1..document.end
        };
        assert_same(
            "dk",
            &before.dk,
            &after.dk,
            key_token,
            keys.clone(),
            context,
        );
        assert_same("dv", &before.dv, &after.dv, key_token, keys, context);
    }
}

/// A thousand perturbations for each path: packed documents, grouped heads, every head dimension,
/// sliding windows.
#[test]
fn exact_options_let_no_later_position_show() {
    let shapes = [[2, 1, 64], [2, 2, 96], [1, 1, 128], [1, 1, 256]];
    for path in LOW_BIT {
        let mut rng = rng(path as u64);
        let mut changes = 0;
        while changes < 1000 {
            let lengths: Vec<usize> = (0..rng.random_range(1..4))
                .map(|_| edgy_length(&mut rng) % 160)
                .collect();
            let shape = shapes[rng.random_range(0..shapes.len())];
            let problem = Problem::gaussian(&lengths, shape, &mut rng);
            if problem.rows() == 0 {
                continue;
            }
            let mask = [Mask::Causal, Mask::window(40)][rng.random_range(0..2)];
            let mut options = Options::new(path, mask).exact();
            if path == Path::Fp4 && rng.random() {
                options.value_scales = ValueScales::Everywhere;
            }
            if path != Path::Fp4 {
                options.normaliser =
                    [Normaliser::Rounded, Normaliser::Unrounded][rng.random_range(0..2)];
            }
            let before = compute::<bf16>(&problem, &options);
            for _ in 0..20 {
                let change = Change::random(&problem, &mut rng);
                let after = compute::<bf16>(&change.apply(&problem, &mut rng), &options);
                let context = format!("{path} {mask} {lengths:?} {shape:?}");
                assert_untouched(&problem, &before, &after, change, &context);
                changes += 1;
            }
        }
    }
}

/// The same for a batch of sequences, through views with strides of their own.
#[test]
fn exact_options_hold_for_batches() {
    for path in LOW_BIT {
        let mut rng = rng(100 + path as u64);
        // Sequences of a batch are documents of equal length.
        let problem = Problem::gaussian(&[70, 70, 70], [2, 1, 64], &mut rng);
        let options = Options::new(path, Mask::Causal).exact();
        let before = compute_batched(&problem, 3, &options);
        assert_eq!(
            before,
            compute::<bf16>(&problem, &options),
            "{path}: batched and packed differ"
        );
        for _ in 0..100 {
            let change = Change::random(&problem, &mut rng);
            let after = compute_batched(&change.apply(&problem, &mut rng), 3, &options);
            assert_untouched(&problem, &before, &after, change, &path.to_string());
        }
    }
}

/// The test above can fail: each exact option closes a leak that is there without it.
#[test]
fn each_exact_option_closes_a_leak() {
    let exact = Options::new(Path::Mxfp8, Mask::Causal).exact();
    let without = [
        Options {
            operand_scales: OperandScales::Block,
            ..exact
        },
        Options {
            ds_exponent: DsExponent::Square,
            ..exact
        },
        Options {
            dq: DqAccumulator::Fp16,
            ..exact
        },
    ];
    let mut rng = rng(8);
    let mut problem = Problem::gaussian(&[64], [1, 1, 64], &mut rng);
    // Small entries, which a raised exponent pushes under the normal range.
    for x in [
        &mut problem.q,
        &mut problem.k,
        &mut problem.v,
        &mut problem.d_o,
    ] {
        x.iter_mut()
            .for_each(|x| *x = to_bf16(*x * f64::from(rng.random_range(-12..1)).exp2()));
    }
    let row = 40;
    let mut later = problem.clone();
    for x in [&mut later.q, &mut later.k, &mut later.v, &mut later.d_o] {
        x[row * 64..(row + 1) * 64]
            .iter_mut()
            .for_each(|x| *x *= 4096.0);
    }
    let differs = |options: &Options| {
        let (before, after) = (
            compute::<bf16>(&problem, options),
            compute::<bf16>(&later, options),
        );
        bits(&before.o[..row * 64]) != bits(&after.o[..row * 64])
            || bits(&before.dq[..row * 64]) != bits(&after.dq[..row * 64])
    };
    assert!(!differs(&exact));
    for options in without {
        assert!(differs(&options), "{options:?}");
    }
    for (path, k_fold) in [(Path::Fp4, true), (Path::Fp4, false)] {
        let options = Options {
            k_fold,
            dq: DqAccumulator::Fp32,
            ..Options::new(path, Mask::Causal)
        };
        assert_eq!(differs(&options), !k_fold, "K fold {k_fold}");
    }
}

/// By default a later position reaches no further back than the start of its block of 32 (paper,
/// appendix A.3), but for the FP16 scale of dQ.
#[test]
fn default_scales_reach_no_further_back_than_a_block() {
    for path in LOW_BIT {
        let options = Options {
            dq: DqAccumulator::Fp32,
            ..Options::new(path, Mask::Causal)
        };
        let mut rng = rng(50 + path as u64);
        let problem = Problem::gaussian(&[150, 40], [2, 1, 64], &mut rng);
        let before = compute::<bf16>(&problem, &options);
        for _ in 0..100 {
            let change = Change::random(&problem, &mut rng);
            let after = compute::<bf16>(&change.apply(&problem, &mut rng), &options);
            for (index, document) in problem.documents.iter().enumerate() {
                let end = if document.contains(&change.row) {
                    document.start + (change.row - document.start) / BLOCK * BLOCK
                } else {
                    document.end
                };
                let context = format!("{path} document {index} {change:?}");
                for (name, before, after) in
                    [("o", &before.o, &after.o), ("dq", &before.dq, &after.dq)]
                {
                    assert_same(name, before, after, 128, document.start..end, &context);
                }
            }
        }
    }
}
