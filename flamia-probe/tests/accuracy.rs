//! The accuracy probe's rows.

use clap::Parser;
use flamia_probe::accuracy::{Accuracy, Row};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    probe: Accuracy,
}

fn rows(line: &str) -> Vec<Row> {
    let line = std::iter::once("accuracy").chain(line.split_whitespace());
    Line::try_parse_from(line).unwrap().probe.rows().unwrap()
}

#[test]
fn paths_stand_in_the_order_of_their_precision() {
    let rows = rows("--length 512,300 --heads 2 --kv-heads 1");
    assert_eq!(rows.len(), 2 * 2 * 4);
    for rows in rows.chunks(4) {
        let [reference, mxfp8, nvfp4, fp4] = rows else {
            panic!("four paths");
        };
        assert!(reference.o > 1.0 - 1e-9 && reference.dk_rel < 1e-5);
        for pair in [[reference, mxfp8], [mxfp8, nvfp4], [nvfp4, fp4]] {
            assert!(pair[0].o > pair[1].o && pair[0].dq > pair[1].dq, "{pair:?}");
            assert!(pair[0].dv_rel < pair[1].dv_rel, "{pair:?}");
        }
        assert!(
            mxfp8.o > 0.998 && nvfp4.o > 0.985 && fp4.o > 0.97,
            "{rows:?}"
        );
    }
}

/// Paper, appendix A.2: the rotation hurts NVFP4's fine scales where a channel of K is an outlier.
#[test]
fn outlier_channels_meet_the_rotation() {
    let o = |hadamard: &str| {
        let line =
            format!("--input outliers --path nvfp4 --mask full --length 512 --hadamard {hadamard}");
        rows(&line)[0].o
    };
    let (on, off) = (o("on"), o("off"));
    println!("nvfp4 with outliers in K: O cosine {off:.4}, rotated {on:.4}");
    assert!(off > on + 0.01, "{off} {on}");
}

#[test]
fn an_inference_exponential_costs_little_output() {
    let row = |line: &str| rows(&format!("--length 256 --mask causal {line}"))[0].clone();
    let exact = row("--path mxfp8");
    let schraudolph = row("--path mxfp8 --exponential schraudolph");
    assert!((exact.o - schraudolph.o).abs() < 1e-3);
    assert_ne!(exact.o, schraudolph.o);
    // There is no backward pass to measure.
    assert!(schraudolph.dq.is_nan() && schraudolph.dk_rel.is_nan());
}
