//! The `mxfp8` path: accuracy, independence of documents, causality, poison, range.

mod common;

use common::*;
use flamia_kernels::{DqAccumulator, Mask, MmaAccumulator, Options, Path, Profile, Stats};
use flamia_sched::{BLOCK, Documents};
use half::bf16;
use proptest::prelude::*;
use rand::RngExt;

const PROFILES: [Profile; 2] = [Profile::BlockScaled, Profile::Hopper];

fn mxfp8(mask: Mask, profile: Profile) -> Options {
    Options {
        profile,
        ..Options::new(Path::Mxfp8, mask)
    }
}

/// The cosines of the numerics contract: O and dQ against exact attention on the same BF16
/// Gaussian operands, 4,096 tokens (2,048 in the `hopper` profile), head dimension 128. dK and dV,
/// which the contract does not list, must be as good as dQ.
#[test]
fn has_the_cosines_of_the_contract() {
    let table = [
        (Profile::BlockScaled, 4096, Mask::Causal, 0.9988, 0.9979),
        (Profile::BlockScaled, 4096, Mask::Full, 0.9985, 0.9978),
        (Profile::Hopper, 2048, Mask::Causal, 0.9986, 0.9977),
        (Profile::Hopper, 2048, Mask::Full, 0.9985, 0.9978),
    ];
    for (profile, len, mask, o, dq) in table {
        let problem = Problem::gaussian(&[len], [1, 1, 128], &mut rng(len as u64));
        let exact = compute::<f64>(&problem, &Options::new(Path::Reference, mask));
        let found = compute::<bf16>(&problem, &mxfp8(mask, profile));
        let cosines = std::array::from_fn::<f64, 4, _>(|i| {
            cosine(found.tensors()[i].1, exact.tensors()[i].1)
        });
        println!("{profile} {mask} {len}: O, dQ, dK, dV {cosines:.5?}");
        assert!(
            (cosines[0] - o).abs() < 0.001,
            "{profile} {mask}: O {}",
            cosines[0]
        );
        assert!(
            (cosines[1] - dq).abs() < 0.001,
            "{profile} {mask}: dQ {}",
            cosines[1]
        );
        assert!(
            cosines[2] > dq - 0.001,
            "{profile} {mask}: dK {}",
            cosines[2]
        );
        assert!(
            cosines[3] > dq - 0.001,
            "{profile} {mask}: dV {}",
            cosines[3]
        );
        let lse = relative_error(&found.lse, &exact.lse);
        assert!(lse < 0.01, "{profile} {mask}: lse differs by {lse}");
    }
}

/// The comparison above must be able to fail: half of one key block's exponent is a visible error.
#[test]
fn the_cosine_notices_a_wrong_exponent() {
    let problem = Problem::gaussian(&[256], [1, 1, 64], &mut rng(5));
    let mut wrong = problem.clone();
    wrong.k[..BLOCK * 64].iter_mut().for_each(|k| *k *= 2.0);
    let exact = compute::<f64>(&problem, &Options::new(Path::Reference, Mask::Causal));
    for profile in PROFILES {
        let found = compute::<bf16>(&wrong, &mxfp8(Mask::Causal, profile));
        assert!(cosine(&found.o, &exact.o) < 0.99);
    }
}

#[test]
fn short_documents_and_groups_are_as_accurate() {
    for profile in PROFILES {
        for shape in [[4, 2, 64], [6, 2, 128], [3, 3, 64]] {
            for mask in [Mask::Causal, Mask::Full] {
                let lengths = [1, 0, 31, 32, 33, 127, 128, 129, 200];
                let problem = Problem::gaussian(&lengths, shape, &mut rng(9));
                let exact = oracle(&problem, mask);
                let found = compute::<bf16>(&problem, &mxfp8(mask, profile));
                for ((name, found), (_, exact)) in found.tensors().into_iter().zip(exact.tensors())
                {
                    let cosine = cosine(found, exact);
                    assert!(
                        cosine > 0.9965,
                        "{profile} {mask} {shape:?}: {name} {cosine}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// What a document gets does not depend on where it lies and what lies beside it.
    #[test]
    fn a_document_alone_and_packed_is_the_same_to_the_bit(
        seed in 0u64..1 << 32,
        group in 1usize..4,
        wide in any::<bool>(),
        causal in any::<bool>(),
        hopper in any::<bool>(),
        fp32 in any::<bool>(),
    ) {
        let mut rng = rng(seed);
        let lengths: Vec<usize> = (0..rng.random_range(1..5)).map(|_| edgy_length(&mut rng)).collect();
        let head_dim = if wide { 128 } else { 64 };
        let mut problem = Problem::gaussian(&lengths, [2 * group, 2, head_dim], &mut rng);
        // A loud first document must not disturb the others.
        let loud = problem.documents.get(0).unwrap().len() * 2 * head_dim;
        problem.k[..loud].iter_mut().for_each(|x| *x = to_bf16(*x * 1e4));
        problem.v[..loud].iter_mut().for_each(|x| *x = to_bf16(*x * 1e4));
        let options = Options {
            profile: if hopper { Profile::Hopper } else { Profile::BlockScaled },
            dq: if fp32 { DqAccumulator::Fp32 } else { DqAccumulator::Fp16 },
            ..Options::new(Path::Mxfp8, if causal { Mask::Causal } else { Mask::Full })
        };

        let packed = compute::<bf16>(&problem, &options);
        for (index, rows) in problem.documents.iter().enumerate() {
            let alone = compute::<bf16>(&problem.document(index), &options);
            for (i, (name, alone)) in alone.tensors().into_iter().enumerate() {
                let heads = if i < 2 { problem.heads } else { problem.kv_heads };
                let token = heads * head_dim;
                let packed = &packed.tensors()[i].1[rows.start * token..rows.end * token];
                prop_assert_eq!(bits(packed), bits(alone), "{} of document {}", name, index);
            }
            for head in 0..problem.heads {
                let packed = &packed.lse[head * problem.rows()..][rows.clone()];
                let alone = &alone.lse[head * rows.len()..][..rows.len()];
                prop_assert_eq!(bits(packed), bits(alone));
            }
        }
    }
}

/// The first row whose results differ, in any head.
fn first_difference(a: &[f64], b: &[f64], token: usize) -> Option<usize> {
    a.chunks(token)
        .zip(b.chunks(token))
        .position(|(a, b)| bits(a) != bits(b))
}

fn last_difference(a: &[f64], b: &[f64], token: usize) -> Option<usize> {
    a.chunks(token)
        .zip(b.chunks(token))
        .rposition(|(a, b)| bits(a) != bits(b))
}

/// Perturbs positions from inside blocks and on their edges. Results of earlier positions may
/// change only inside the perturbed block of 32 (paper, appendix A.3); the FP16 dQ accumulator adds
/// a dependency on the whole document (A.4), so dQ is held to the bound with FP32.
#[test]
fn later_positions_reach_no_further_back_than_their_block() {
    const CUTS: [usize; 10] = [1, 7, 15, 16, 31, 32, 33, 40, 63, 64];
    for profile in PROFILES {
        let options = Options {
            dq: DqAccumulator::Fp32,
            ..mxfp8(Mask::Causal, profile)
        };
        let problem = Problem::gaussian(&[128, 40], [2, 1, 64], &mut rng(3));
        let base = compute::<bf16>(&problem, &options);
        let mut in_block = 0;
        for cut in CUTS {
            let block = cut / BLOCK * BLOCK;
            // Keys and values from `cut` on.
            let mut later = problem.clone();
            for x in [&mut later.k, &mut later.v] {
                x[cut * 64..128 * 64]
                    .iter_mut()
                    .for_each(|x| *x *= f64::from(1 << 20));
            }
            let changed = compute::<bf16>(&later, &options);
            for (name, base, changed, token) in [
                ("o", &base.o, &changed.o, 128),
                ("dq", &base.dq, &changed.dq, 128),
            ] {
                let first = first_difference(base, changed, token).unwrap();
                assert!(
                    first >= block,
                    "{profile}: {name} of row {first} sees row {cut}"
                );
                in_block += usize::from(first < cut);
            }
            // Queries and output gradients before `cut`.
            let mut earlier = problem.clone();
            for x in [&mut earlier.q, &mut earlier.d_o] {
                x[..cut * 128]
                    .iter_mut()
                    .for_each(|x| *x *= f64::from(1 << 20));
            }
            let changed = compute::<bf16>(&earlier, &options);
            let end = cut.next_multiple_of(BLOCK);
            for (name, base, changed) in
                [("dk", &base.dk, &changed.dk), ("dv", &base.dv, &changed.dv)]
            {
                let last = last_difference(base, changed, 64).unwrap();
                assert!(
                    last < end,
                    "{profile}: {name} of row {last} sees queries before {cut}"
                );
                in_block += usize::from(last >= cut);
            }
        }
        // The residue inside a block is real: cuts on block edges alone would show nothing.
        assert!(in_block > 0);
    }
}

/// The public case: causal, 128 keys, V zero but for 2^-20 at key 0; then a 1.0 at key 16 (the same
/// block of 32) or at key 32 (the next).
#[test]
fn a_value_in_the_next_block_leaves_a_tiny_one_alone() {
    let mut problem = Problem::gaussian(&[128], [1, 1, 128], &mut rng(0));
    problem.q.fill(1.0);
    problem.k.fill(1.0);
    problem.v.fill(0.0);
    problem.v[0] = 2f64.powi(-20);
    let with = |row: usize| {
        let mut problem = problem.clone();
        problem.v[row * 128] = 1.0;
        problem
    };
    for profile in PROFILES {
        let options = mxfp8(Mask::Causal, profile);
        let outputs = |problem: &Problem| -> Vec<f64> {
            let o = compute::<bf16>(problem, &options).o;
            (0..8).map(|row| o[row * 128]).collect()
        };
        let base = outputs(&problem);
        for (row, o) in base.iter().enumerate() {
            let expected = 2f64.powi(-20) / (row + 1) as f64;
            assert!(
                (o / expected - 1.0).abs() < 0.04,
                "{profile}: row {row}: {o:e}"
            );
        }
        assert_eq!(bits(&outputs(&with(32))), bits(&base), "{profile}");
        // The documented residue: 2^-20 is far under the smallest code beside a 1.0.
        assert_eq!(outputs(&with(16)), vec![0.0; 8], "{profile}");
    }
}

#[test]
fn nan_poisons_its_block_and_nothing_else() {
    let lengths = [70, 100];
    let token = 2 * 64;
    for profile in PROFILES {
        for (mask, bad) in [(Mask::Causal, f64::NAN), (Mask::Full, f64::INFINITY)] {
            let problem = Problem::gaussian(&lengths, [2, 2, 64], &mut rng(2));
            let clean = compute::<bf16>(&problem, &mxfp8(mask, profile));
            // Row 5 of the second document's second block, head 0.
            let row = 70 + BLOCK + 5;
            for which in 0..4 {
                let mut poisoned = problem.clone();
                let x = [
                    &mut poisoned.q,
                    &mut poisoned.k,
                    &mut poisoned.v,
                    &mut poisoned.d_o,
                ];
                x.into_iter().nth(which).unwrap()[row * token + 3] = bad;
                let found = compute::<bf16>(&poisoned, &mxfp8(mask, profile));
                for ((name, found), (_, clean)) in found.tensors().into_iter().zip(clean.tensors())
                {
                    // The first document and the other head are untouched.
                    assert_eq!(
                        bits(&found[..70 * token]),
                        bits(&clean[..70 * token]),
                        "{name}"
                    );
                    for (found, clean) in found.chunks(64).zip(clean.chunks(64)).skip(1).step_by(2)
                    {
                        assert_eq!(bits(found), bits(clean), "{name}");
                    }
                }
                if which < 3 {
                    // Rows that read the block are NaN, earlier rows of a causal call are not.
                    let rows: Vec<bool> = (70..170)
                        .map(|row| found.o[row * token..][..64].iter().all(|x| x.is_nan()))
                        .collect();
                    let expected: Vec<bool> = (0..100)
                        .map(|row| match (which, mask) {
                            (0, _) => row / BLOCK == 1,
                            (_, mask) => !mask.is_causal() || row >= BLOCK,
                        })
                        .collect();
                    assert_eq!(rows, expected, "{profile} {mask} {which}");
                    if mask == Mask::Causal && which > 0 {
                        let end = (70 + BLOCK) * token;
                        assert_eq!(bits(&found.o[..end]), bits(&clean.o[..end]));
                    }
                }
            }
        }
    }
}

/// Outlier channels of K overflow a fixed FP16 scale; the data-dependent one is sized so that they
/// cannot.
#[test]
fn outlier_keys_do_not_overflow_dq() {
    for scale in [1e3, 1e6, 1e-6] {
        let mut problem = Problem::gaussian(&[300, 50], [2, 1, 64], &mut rng(8));
        problem
            .k
            .iter_mut()
            .step_by(64)
            .for_each(|k| *k = to_bf16(*k * scale));
        problem
            .q
            .iter_mut()
            .step_by(64)
            .for_each(|q| *q = to_bf16(*q / scale));
        problem
            .d_o
            .iter_mut()
            .for_each(|x| *x = to_bf16(*x * scale));
        let options = mxfp8(Mask::Causal, Profile::BlockScaled);
        let found = compute::<bf16>(&problem, &options);
        assert!(found.dq.iter().all(|x| x.is_finite()));
        let fp32 = compute::<bf16>(
            &problem,
            &Options {
                dq: DqAccumulator::Fp32,
                ..options
            },
        );
        let cosine = cosine(&found.dq, &fp32.dq);
        assert!(
            cosine > 0.9999,
            "FP16 partial sums lose too much to FP32 ones: {cosine}"
        );
    }
}

#[test]
fn operands_of_any_magnitude_give_finite_results() {
    for profile in PROFILES {
        for exponent in [-60, -30, 0, 30] {
            let mut problem = Problem::gaussian(&[96], [1, 1, 64], &mut rng(4));
            let scale = 2f64.powi(exponent);
            problem.v.iter_mut().for_each(|x| *x *= scale);
            problem.d_o.iter_mut().for_each(|x| *x /= scale);
            let exact = oracle(&problem, Mask::Causal);
            let found = compute::<bf16>(&problem, &mxfp8(Mask::Causal, profile));
            for ((name, found), (_, exact)) in found.tensors().into_iter().zip(exact.tensors()) {
                assert!(
                    cosine(found, exact) > 0.996,
                    "{profile} 2^{exponent}: {name}"
                );
            }
        }
    }
}

/// Blocks of V and dO that are all zero have the smallest exponent, which must not become a
/// reference for the others.
#[test]
fn zero_blocks_cost_the_others_nothing() {
    for profile in PROFILES {
        let mut problem = Problem::gaussian(&[160], [1, 1, 64], &mut rng(6));
        for block in [0, 2, 4] {
            let rows = block * BLOCK * 64..(block + 1) * BLOCK * 64;
            problem.v[rows.clone()].fill(0.0);
            problem.d_o[rows].fill(0.0);
        }
        for mask in [Mask::Causal, Mask::Full] {
            let exact = oracle(&problem, mask);
            let found = compute::<bf16>(&problem, &mxfp8(mask, profile));
            for ((name, found), (_, exact)) in found.tensors().into_iter().zip(exact.tensors()) {
                let cosine = cosine(found, exact);
                assert!(cosine > 0.996, "{profile} {mask}: {name} {cosine}");
            }
        }
    }
}

/// The share of dS rounded to zero on Gaussian operands, and no saturation whatever the scores.
#[test]
fn counts_what_rounding_flushed() {
    let problem = Problem::gaussian(&[2048], [1, 1, 128], &mut rng(7));
    let mut peaked = problem.clone();
    peaked.q.iter_mut().for_each(|q| *q *= 3.0);
    let flush = |problem: &Problem, profile| {
        let stats = Stats::default();
        compute_with_stats::<bf16>(problem, &mxfp8(Mask::Causal, profile), Some(&stats));
        let counts = stats.take();
        assert_eq!(counts.saturated, 0);
        assert_eq!(stats.snapshot(), Default::default());
        counts.ds_flush_fraction()
    };
    // Independent model: 0.02 % and 19.1 % for one exponent per 32x32.
    let (plain, steep) = (
        flush(&problem, Profile::BlockScaled),
        flush(&peaked, Profile::BlockScaled),
    );
    println!("32x32: {plain:.5} {steep:.4}");
    assert!((0.0001..0.0004).contains(&plain), "{plain}");
    assert!((0.17..0.21).contains(&steep), "{steep}");
    // Running references per row are finer.
    let (plain, steep) = (
        flush(&problem, Profile::Hopper),
        flush(&peaked, Profile::Hopper),
    );
    println!("per row: {plain:.5} {steep:.4}");
    assert!(plain < 0.0004 && steep < 0.17, "{plain} {steep}");
}

/// The accumulator of the chip truncates; with O promoted every 128 keys the bias stays small.
#[test]
fn the_chips_accumulator_is_a_small_bias() {
    let mut problem = Problem::gaussian(&[300], [1, 1, 64], &mut rng(11));
    problem.v.iter_mut().for_each(|v| *v = to_bf16(*v + 1.0));
    let options = mxfp8(Mask::Causal, Profile::Hopper);
    let fp32 = compute::<bf16>(&problem, &options);
    let chip = Options {
        accumulator: MmaAccumulator::Hopper,
        ..options
    };
    let chip = compute::<bf16>(&problem, &chip);
    assert_ne!(bits(&chip.dq), bits(&fp32.dq));
    for ((name, chip), (_, fp32)) in chip.tensors().into_iter().zip(fp32.tensors()) {
        assert!(
            cosine(chip, fp32) > 0.9999,
            "{name}: {}",
            cosine(chip, fp32)
        );
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    let problem = Problem::gaussian(&[300, 1, 77, 128], [4, 2, 64], &mut rng(12));
    for profile in PROFILES {
        let options = mxfp8(Mask::Causal, profile);
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| compute::<bf16>(&problem, &options))
        };
        assert!(on(1) == on(5));
    }
}

#[test]
fn a_hundred_thousand_documents_of_one_token() {
    let rows = 100_000;
    let mut problem = Problem::gaussian(&[1], [1, 1, 64], &mut rng(1));
    for x in [
        &mut problem.q,
        &mut problem.k,
        &mut problem.v,
        &mut problem.d_o,
    ] {
        *x = x.repeat(rows);
    }
    problem.documents = Documents::batched(rows, 1).unwrap();
    let found = compute::<bf16>(&problem, &mxfp8(Mask::Causal, Profile::BlockScaled));
    let alone = compute::<bf16>(
        &problem.document(0),
        &mxfp8(Mask::Causal, Profile::BlockScaled),
    );
    assert!(found.o == alone.o.repeat(rows));
    assert!(found.dv == alone.dv.repeat(rows));
    assert!(
        found.dq.iter().all(|x| *x == 0.0),
        "one key leaves nothing to choose"
    );
}
