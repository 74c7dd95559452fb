//! The one-kernel form of the `hopper` profile's backward pass: what it shares with the two-kernel form,
//! and what its dQ costs.

mod common;

use common::*;
use flamia_kernels::{
    AttentionError, BackwardForm, DqAccumulator, Mask, MmaAccumulator, Options, Path, Profile,
    Stats,
};
use half::bf16;

fn two_kernel(mask: Mask) -> Options {
    Options {
        profile: Profile::Hopper,
        ..Options::new(Path::Mxfp8, mask)
    }
}

fn one_kernel(mask: Mask, dq: DqAccumulator) -> Options {
    Options {
        backward: BackwardForm::OneKernel,
        dq,
        ..two_kernel(mask)
    }
}

const SUMS: [DqAccumulator; 2] = [DqAccumulator::Fp16, DqAccumulator::Fp32];

#[test]
fn values_get_the_same_bits_and_the_others_nearly_the_same() {
    let lengths = [1, 0, 31, 33, 64, 65, 129, 200];
    for shape in [[4, 2, 64], [3, 1, 128]] {
        for mask in [Mask::Causal, Mask::Full, Mask::window(70)] {
            let problem = Problem::gaussian(&lengths, shape, &mut rng(1));
            let two = compute::<bf16>(&problem, &two_kernel(mask));
            let exact = compute::<f64>(&problem, &Options::new(Path::Reference, mask));
            for dq in SUMS {
                let one = compute::<bf16>(&problem, &one_kernel(mask, dq));
                assert_eq!(bits(&one.dv), bits(&two.dv), "{shape:?} {mask} {dq}");
                for (name, one, two, exact) in [
                    ("dQ", &one.dq, &two.dq, &exact.dq),
                    ("dK", &one.dk, &two.dk, &exact.dk),
                ] {
                    let [to_two, to_exact] = [two, exact].map(|other| cosine(one, other));
                    assert!(
                        to_two > 0.999 && to_exact > 0.9965,
                        "{name} {shape:?} {mask} {dq}: {to_two} {to_exact}"
                    );
                }
            }
        }
    }
}

/// The contract's cosine of dQ, 2,048 tokens, head dimension 128.
#[test]
fn dq_has_the_cosine_of_the_contract() {
    for (mask, contract) in [(Mask::Causal, 0.9977), (Mask::Full, 0.9978)] {
        let problem = Problem::gaussian(&[2048], [1, 1, 128], &mut rng(2048));
        let exact = compute::<f64>(&problem, &Options::new(Path::Reference, mask));
        for dq in SUMS {
            let found = compute::<bf16>(&problem, &one_kernel(mask, dq));
            let cosine = cosine(&found.dq, &exact.dq);
            println!("{mask} {dq}: {cosine:.5}");
            assert!((cosine - contract).abs() < 0.001, "{mask} {dq}: {cosine}");
        }
    }
}

/// Outlier channels of K and queries whose dO are far apart: no sum overflows, and FP16 costs little, since
/// every 32 queries have a power of two of their own.
#[test]
fn sums_in_fp16_neither_overflow_nor_vanish() {
    for scale in [1e3, 1e6, 1e-6] {
        let mut problem = Problem::gaussian(&[300, 50], [2, 1, 64], &mut rng(3));
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
        // Blocks of 32 rows of two heads, up to a factor of a million from one to the next.
        for (block, rows) in problem.d_o.chunks_mut(32 * 2 * 64).enumerate() {
            let factor = [1.0, scale, 1.0 / scale][block % 3];
            rows.iter_mut().for_each(|x| *x = to_bf16(*x * factor));
        }
        let [fp16, fp32] =
            SUMS.map(|dq| compute::<bf16>(&problem, &one_kernel(Mask::Causal, dq)).dq);
        assert!(fp16.iter().all(|x| x.is_finite()), "{scale}");
        // Of rows that are of one size: a cosine over all would see the largest alone.
        for (row, (fp16, fp32)) in fp16.chunks(64).zip(fp32.chunks(64)).enumerate() {
            if fp32.iter().any(|x| *x != 0.0) {
                let cosine = cosine(fp16, fp32);
                assert!(cosine > 0.999, "{scale}, row {row}: {cosine}");
            }
        }
    }
}

/// dS is BF16: nearer to exact attention than E4M3 codes relative to a row's reference, and nothing of it is
/// flushed.
#[test]
fn gradients_lose_less_than_with_two_kernels() {
    let mut problem = Problem::gaussian(&[2048], [1, 1, 128], &mut rng(7));
    problem.q.iter_mut().for_each(|q| *q *= 3.0);
    let exact = compute::<f64>(&problem, &Options::new(Path::Reference, Mask::Causal));
    let found = |options: &Options| {
        let stats = Stats::default();
        let found = compute_with_stats::<bf16>(&problem, options, Some(&stats));
        let cosines = [(&found.dq, &exact.dq), (&found.dk, &exact.dk)];
        (cosines.map(|(a, b)| cosine(a, b)), stats.take())
    };
    let (one, counts) = found(&one_kernel(Mask::Causal, DqAccumulator::Fp32));
    let (two, _) = found(&two_kernel(Mask::Causal));
    println!("{one:.5?} {two:.5?}");
    assert!(one[0] > two[0] && one[1] > two[1], "{one:?} {two:?}");
    assert_eq!(counts.ds_flushed, 0);
}

#[test]
fn nan_poisons_what_reads_it_and_nothing_else() {
    for mask in [Mask::Causal, Mask::Full] {
        let problem = Problem::gaussian(&[100, 96], [1, 1, 64], &mut rng(5));
        let options = Options {
            accumulator: MmaAccumulator::Hopper,
            ..one_kernel(mask, DqAccumulator::Fp16)
        };
        let clean = compute::<bf16>(&problem, &options);
        let mut poisoned = problem.clone();
        // A key in the second block of the first document.
        poisoned.k[40 * 64] = f64::NAN;
        let found = compute::<bf16>(&poisoned, &options);
        for row in 0..196 {
            let of_row = |x: &[f64]| x[row * 64..(row + 1) * 64].to_vec();
            let reads = row < 100 && (mask == Mask::Full || row >= 32);
            if reads {
                assert!(of_row(&found.dq).iter().all(|x| x.is_nan()), "{mask} {row}");
            } else {
                assert_eq!(
                    bits(&of_row(&found.dq)),
                    bits(&of_row(&clean.dq)),
                    "{mask} {row}"
                );
            }
        }
    }
}

/// The reference has no rule to pick by.
#[test]
fn auto_is_two_kernels_here() {
    let problem = Problem::gaussian(&[2100], [1, 1, 64], &mut rng(6));
    let auto = two_kernel(Mask::Causal);
    assert_eq!(auto.backward, BackwardForm::Auto);
    let named = Options {
        backward: BackwardForm::TwoKernel,
        ..auto
    };
    let [auto, named] = [auto, named].map(|options| compute::<bf16>(&problem, &options));
    for (auto, named) in [
        (auto.dq, named.dq),
        (auto.dk, named.dk),
        (auto.dv, named.dv),
    ] {
        assert_eq!(bits(&auto), bits(&named));
    }
}

#[test]
fn what_it_does_not_go_with_is_refused() {
    let refused = |options: Options| {
        let error = options.validate(128).unwrap_err();
        assert!(matches!(error, AttentionError::Combination { .. }));
        error.to_string()
    };
    let block_scaled = Options {
        backward: BackwardForm::OneKernel,
        profile: Profile::BlockScaled,
        ..Options::new(Path::Mxfp8, Mask::Causal)
    };
    assert!(refused(block_scaled).contains("one-kernel"));
    let causal = one_kernel(Mask::Causal, DqAccumulator::Fp16Causal);
    assert!(refused(causal).contains("fp16-causal"));
}
