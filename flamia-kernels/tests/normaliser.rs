//! What the rows of O are divided by: the sum of the probabilities before or after they are rounded.

mod common;

use common::*;
use flamia_kernels::{
    Ablation, AttentionError, Mask, MmaAccumulator, Normaliser, Options, Path, Profile,
};
use half::bf16;
use rand::RngExt;

fn mxfp8(profile: Profile, normaliser: Normaliser) -> Options {
    Options {
        profile,
        normaliser,
        ..Options::new(Path::Mxfp8, Mask::Causal)
    }
}

/// Every kind of call that has both.
fn with_both() -> Vec<Options> {
    let hopper = mxfp8(Profile::Hopper, Normaliser::Auto);
    let block_scaled = [Path::Mxfp8, Path::Nvfp4].map(|path| Options::new(path, Mask::Causal));
    let [mxfp8, nvfp4] = block_scaled;
    vec![
        hopper,
        Options {
            accumulator: MmaAccumulator::Hopper,
            ..hopper
        },
        mxfp8,
        mxfp8.exact(),
        nvfp4,
        nvfp4.exact(),
    ]
}

/// Gaussian operands, V and dO with a mean, Q times 4 so that single keys dominate rows.
fn peaked(value_mean: f64, gradient_mean: f64) -> Problem {
    let mut problem = Problem::gaussian(&[768], [1, 1, 64], &mut rng(1));
    let shift = |x: &mut [f64], by: f64| x.iter_mut().for_each(|x| *x = to_bf16(*x + by));
    shift(&mut problem.v, value_mean);
    shift(&mut problem.d_o, gradient_mean);
    problem.q.iter_mut().for_each(|q| *q *= 4.0);
    problem
}

/// What V has in common is in dP and in D = rowsum(dO ∘ O), and has to cancel.
#[test]
fn peaked_rows_with_a_mean_in_v_keep_dq() {
    for (value_mean, gradient_mean, bound) in [(3.0, 1.0, 0.98), (10.0, 3.0, 0.93)] {
        let problem = peaked(value_mean, gradient_mean);
        let exact = oracle(&problem, Mask::Causal);
        for profile in [Profile::BlockScaled, Profile::Hopper] {
            let [rounded, unrounded] = [Normaliser::Rounded, Normaliser::Unrounded].map(|by| {
                cosine(
                    &compute::<bf16>(&problem, &mxfp8(profile, by)).dq,
                    &exact.dq,
                )
            });
            println!("{profile} V + {value_mean}: dQ {rounded:.4}, unrounded {unrounded:.4}");
            assert!(rounded > bound, "{profile} V + {value_mean}: {rounded}");
            assert!(unrounded < bound - 0.02, "{profile}: {unrounded}");
        }
    }
}

/// A mean of equal rows is that row, whatever the weights, if they sum to 1.
#[test]
fn equal_rows_of_v_come_out_as_they_are() {
    let mut problem = Problem::gaussian(&[300], [1, 1, 64], &mut rng(2));
    problem.q.iter_mut().for_each(|q| *q *= 2.0);
    let mut random = rng(3);
    // E4M3's normal numbers, the largest of them past 224: a block's exponent is then 2.
    let mut row: Vec<f64> = (0..64)
        .map(|_| {
            let significand = 1.0 + f64::from(random.random_range(0..8u8)) / 8.0;
            let sign = if random.random() { 4.0 } else { -4.0 };
            sign * significand * f64::from(random.random_range(0..8)).exp2()
        })
        .collect();
    row[5] = 4.0 * 448.0;
    problem.v = row.repeat(300);
    let is_the_row = |options: &Options| {
        let o = compute::<bf16>(&problem, options).o;
        o.chunks(64).all(|o| o == row)
    };
    // The chip's accumulator truncates, of each column something else.
    for options in with_both()
        .into_iter()
        .filter(|options| options.accumulator == MmaAccumulator::Fp32)
    {
        let by = |normaliser| Options {
            normaliser,
            ..options
        };
        assert!(is_the_row(&by(Normaliser::Rounded)), "{options:?}");
        assert!(!is_the_row(&by(Normaliser::Unrounded)), "{options:?}");
    }
}

/// A block of keys with the V of nothing and most of the probability is rounded coarsely in P · V, which
/// says nothing of its weight; and one token of V is a thousand times the others.
#[test]
fn a_sink_with_a_tiny_v_and_an_outlier_do_no_harm() {
    const DIM: usize = 64;
    let mut problem = Problem::gaussian(&[768], [1, 1, DIM], &mut rng(2));
    // One feature of Q and K is the sink's alone.
    for token in 0..768 {
        problem.q[token * DIM] = 4.0;
        problem.k[token * DIM] = 0.0;
    }
    for key in 0..32 {
        problem.k[key * DIM] = 10.0;
        let v = &mut problem.v[key * DIM..][..DIM];
        v.iter_mut().for_each(|v| *v *= 2f64.powi(-10));
    }
    let outlier = &mut problem.v[100 * DIM..][..DIM];
    outlier.iter_mut().for_each(|v| *v = to_bf16(*v * 1000.0));

    let exact = oracle(&problem, Mask::Causal);
    let probability_of_sink: f64 = (700..768)
        .map(|row| {
            let score = |key: usize| -> f64 {
                let [q, k] =
                    [(&problem.q, row), (&problem.k, key)].map(|(x, row)| &x[row * DIM..][..DIM]);
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / 8.0
            };
            let sink = (0..32).map(|key| (score(key) - exact.lse[row]).exp());
            sink.sum::<f64>() / 68.0
        })
        .sum();
    assert!(probability_of_sink > 0.6, "{probability_of_sink}");

    let cosines = |normaliser| {
        let found = compute::<bf16>(&problem, &mxfp8(Profile::Hopper, normaliser));
        [cosine(&found.o, &exact.o), cosine(&found.dq, &exact.dq)]
    };
    let (rounded, unrounded) = (cosines(Normaliser::Rounded), cosines(Normaliser::Unrounded));
    println!("O, dQ: {rounded:.5?}, unrounded {unrounded:.5?}");
    for (rounded, unrounded) in rounded.into_iter().zip(unrounded) {
        assert!(rounded > unrounded - 5e-4, "{rounded} {unrounded}");
    }
}

/// Half of the probability is at a sink, the rest spread over 4,096 keys, of whose probabilities many round to zero.
/// Their weight must not go to the sink, whose V is another one.
#[test]
fn a_diffuse_tail_keeps_its_weight_beside_a_sink() {
    const DIM: usize = 64;
    const TAIL: usize = 4096;
    let mut problem = Problem::gaussian(&[TAIL + 32], [1, 1, DIM], &mut rng(6));
    for token in 0..TAIL + 32 {
        let is_sink = token == 0;
        let [q, k, v] =
            [&mut problem.q, &mut problem.k, &mut problem.v].map(|x| &mut x[token * DIM..][..DIM]);
        q.iter_mut()
            .chain(k.iter_mut())
            .for_each(|x| *x = to_bf16(*x * 0.5));
        q[0] = 8.0;
        // e^8 is 2,981: about half of the probability.
        k[0] = if is_sink { 8.0 } else { 0.0 };
        v.iter_mut()
            .for_each(|v| *v += if is_sink { -4.0 } else { 4.0 });
    }
    let exact = oracle(&problem, Mask::Causal);
    // Of the last rows, which see the whole tail.
    let distance = |normaliser| {
        let found = compute::<bf16>(&problem, &mxfp8(Profile::Hopper, normaliser));
        let last = TAIL * DIM..;
        let squares = found.o[last.clone()].iter().zip(&exact.o[last]);
        let squares = squares.map(|(found, exact)| (found - exact).powi(2));
        squares.sum::<f64>().sqrt()
    };
    let (rounded, unrounded) = (
        distance(Normaliser::Rounded),
        distance(Normaliser::Unrounded),
    );
    println!("{rounded:.4} {unrounded:.4}");
    assert!(rounded < 0.9 * unrounded, "{rounded} {unrounded}");
}

#[test]
fn lse_is_the_same_to_the_bit() {
    let mut problem = peaked(3.0, 1.0);
    // Folds that differ between blocks and between tokens.
    let mut random = rng(4);
    for v in problem.v.chunks_mut(64) {
        let scale = f64::from(random.random_range(-6..6)).exp2();
        v.iter_mut().for_each(|v| *v *= scale);
    }
    for options in with_both() {
        let results = [Normaliser::Rounded, Normaliser::Unrounded].map(|normaliser| {
            compute::<bf16>(
                &problem,
                &Options {
                    normaliser,
                    ..options
                },
            )
        });
        assert_eq!(bits(&results[0].lse), bits(&results[1].lse), "{options:?}");
        assert_ne!(bits(&results[0].o), bits(&results[1].o), "{options:?}");
    }
}

#[test]
fn auto_is_the_profiles_own() {
    let problem = peaked(3.0, 1.0);
    for (profile, own) in [
        (Profile::BlockScaled, Normaliser::Unrounded),
        (Profile::Auto, Normaliser::Unrounded),
        (Profile::Hopper, Normaliser::Rounded),
    ] {
        let [auto, own] = [Normaliser::Auto, own]
            .map(|normaliser| compute::<bf16>(&problem, &mxfp8(profile, normaliser)));
        assert_eq!(bits(&auto.o), bits(&own.o), "{profile}");
    }
}

#[test]
fn rounded_is_refused_where_p_is_not_in_e4m3() {
    let refused = |path, ablate| {
        let options = Options {
            normaliser: Normaliser::Rounded,
            ablate,
            ..Options::new(path, Mask::Causal)
        };
        matches!(
            options.validate(64),
            Err(AttentionError::Combination { .. })
        )
    };
    assert!(refused(Path::Reference, None));
    assert!(refused(Path::Fp4, None));
    assert!(refused(Path::Mxfp8, Some(Ablation::P4Forward)));
    assert!(!refused(Path::Mxfp8, None));
    assert!(!refused(Path::Nvfp4, Some(Ablation::ExpForward)));
}
