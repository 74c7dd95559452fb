//! The leak probe's bounds on a Hopper GPU: O and LSE of the forward kernel.
//! `cargo test -p flamia-probe --features cuda --test gpu -- --ignored` on a machine that has one.

use clap::Parser;
use flamia_kernels::{Mask, Options, Path, Profile};
use flamia_probe::leakage::{Leakage, Perturbation, Row, Scheme, compare};
use flamia_probe::{Problem, Tensor, attention, gpu, metric};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

const NAME: &str = "mxfp8-hopper-gpu";

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    probe: Leakage,
}

fn scheme(mask: Mask) -> Scheme {
    gpu::schemes(mask).pop().expect("a Hopper GPU")
}

/// What the probe finds of the kernel.
fn rows(line: &str) -> Vec<Row> {
    let line = format!("leakage --scheme {NAME} {line}");
    let probe = Line::try_parse_from(line.split_whitespace()).unwrap().probe;
    let rows = probe.rows(vec![scheme(Mask::Causal)]).unwrap();
    for row in &rows {
        assert!(["o", "lse"].contains(&row.tensor));
        println!("{row:?}");
    }
    rows
}

fn gaussian<'a>(rows: &'a [Row], perturbed: &str, tensor: &str) -> &'a Row {
    rows.iter()
        .find(|row| (&*row.case, &*row.perturbed, row.tensor) == ("gaussian", perturbed, tensor))
        .unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn its_results_are_those_of_the_profile() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let problem = Problem::gaussian(&[200, 0, 77], [4, 2, 128], &mut rng).unwrap();
    for mask in [Mask::Causal, Mask::window(50)] {
        let options = Options {
            profile: Profile::Hopper,
            ..Options::new(Path::Mxfp8, mask)
        };
        let wanted = attention::attend(&problem, &options).unwrap();
        let found = scheme(mask).attend(&problem).unwrap();
        assert!(metric::cosine(&found.o, &wanted.o) > 0.9999);
        assert_eq!(found.lse.len(), wanted.lse.len());
        let pairs = found.lse.iter().zip(&wanted.lse);
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-2));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn block_scales_leak_inside_the_block_only() {
    let rows = rows(
        "--trials 30 --factor 64 --lengths 130,64,1,700,33 --rows 2000 --heads 4 --kv-heads 2",
    );
    assert_eq!(rows.len(), 4 * 2 + 2);
    for row in rows.iter().filter(|row| row.case == "gaussian") {
        assert!(row.reach <= 31, "{row:?}");
        assert!(row.change < 0.01, "{row:?}");
    }
    // V shares scales with earlier rows, and it shows; dO is not read.
    assert!(!gaussian(&rows, "v", "o").bitwise);
    for tensor in ["o", "lse"] {
        assert!(gaussian(&rows, "d_o", tensor).bitwise);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn small_changes_leak_little() {
    let rows = rows("--trials 40 --factor 4 --lengths 130 --heads 1");
    let v = gaussian(&rows, "v", "o");
    // What it moves is less than a unit in the last place of BF16.
    assert!(v.change > 0.0 && v.change <= 2f64.powi(-8), "{v:?}");
}

#[test]
#[ignore = "needs a GPU"]
fn the_public_case_loses_a_small_value_to_its_block_only() {
    let rows = rows("--trials 0");
    let find = |key: usize| {
        let case = format!("public: key {key}");
        rows.iter().find(|row| row.case == case).unwrap()
    };
    // The first row attends to key 0 alone, with a weight that E4M3 has rounded.
    let (row, value) = (find(16), 2f64.powi(-20));
    assert!((row.before - value).abs() <= value / 16.0, "{row:?}");
    assert_eq!(row.after, 0.0);
    assert_eq!((row.change, row.reach, row.bitwise), (1.0, 16, false));
    assert!(find(32).bitwise);
}

/// Blocks of 32 that end where the mask lets nobody look: nothing moves, however large the element.
#[test]
#[ignore = "needs a GPU"]
fn nothing_leaks_past_the_block_under_any_mask() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let problem = Problem::gaussian(&[300, 45, 260], [2, 1, 128], &mut rng).unwrap();
    for mask in [Mask::Causal, Mask::Full, Mask::window(40)] {
        let mut scheme = scheme(mask);
        let before = scheme.attend(&problem).unwrap();
        let mut traces = 0;
        for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
            for _ in 0..10 {
                let perturbation = Perturbation::random(&problem, tensor, 1e5, &mut rng).unwrap();
                let after = scheme.attend(&perturbation.apply(&problem)).unwrap();
                for trace in compare(&problem, mask, &perturbation, &before, &after) {
                    assert!(trace.reach <= 31, "{mask} {tensor} {trace:?}");
                    traces += 1;
                }
            }
        }
        assert_eq!(
            traces,
            3 * 10 * 2,
            "O and LSE of other documents are there always"
        );
    }
}
