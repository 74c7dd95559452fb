//! Calls of the largest shapes on a GPU, from BF16 to BF16: more elements than 32 bits count, and rows
//! of 131,072 tokens.

mod attention;
mod common;
mod quantised;
mod whole_call;

use attention::{Outputs, Problem, Shape};
use common::cosine;
use flamia_kernels::cuda::layout::HeadDim;
use flamia_kernels::{Mask, Path};
use flamia_sched::visible_keys;
use half::bf16;
use rayon::prelude::*;
use whole_call::{Call, Part, cut, kernels, pooled};

const TOKENS: usize = 131_072;

/// Exact attention of some rows of a problem of one document and one head.
fn exact_rows(problem: &Problem, rows: &[usize]) -> Outputs {
    let dims = problem.shape.head_dim.get();
    let dot = |a: &[bf16], b: &[bf16]| -> f64 {
        a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum()
    };
    let row = |x: &[bf16], row: usize| x[row * dims..][..dims].to_vec();
    let attend = |&token: &usize| {
        let keys = visible_keys(token, problem.tokens(), problem.shape.mask);
        let q = row(&problem.q, token);
        let scores: Vec<_> = keys
            .clone()
            .map(|key| dot(&q, &row(&problem.k, key)) / (dims as f64).sqrt())
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut o = vec![0.0; dims];
        for (key, s) in keys.zip(&scores) {
            let p = (s - max).exp() / sum;
            for (o, v) in o.iter_mut().zip(row(&problem.v, key)) {
                *o += p * v.to_f64();
            }
        }
        (o, max + sum.ln())
    };
    let (o, lse): (Vec<_>, Vec<_>) = rows.par_iter().map(attend).unzip();
    Outputs { o: o.concat(), lse }
}

/// Rows of outputs of one head.
fn rows_of(outputs: &Outputs, rows: &[usize], dims: usize) -> Outputs {
    Outputs {
        o: rows
            .iter()
            .flat_map(|row| outputs.o[row * dims..][..dims].to_vec())
            .collect(),
        lse: rows.iter().map(|row| outputs.lse[*row]).collect(),
    }
}

fn check(case: &str, found: &Outputs, wanted: &Outputs, least: f64, lse_error: f64) {
    let similarity = cosine(&found.o, &wanted.o);
    let off = found.lse.iter().zip(&wanted.lse);
    let off = off.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("{case}: cosine 1 - {:.1e}, LSE {off:.1e}", 1.0 - similarity);
    assert!(similarity > least, "{case}: {similarity}");
    assert!(off <= lse_error, "{case}: LSE is off by {off}");
}

fn check_profile(case: &str, found: &Outputs, part: &Problem) {
    check(case, found, &part.on_cpu(Path::Mxfp8), 0.99999, 1e-4);
}

/// Against exact attention, at rows all over the document.
fn check_exact(case: &str, found: &Outputs, part: &Problem) {
    let len = part.tokens();
    let rows: Vec<_> = (0..256).map(|i| i * (len - 1) / 255).collect();
    let found = rows_of(found, &rows, part.shape.head_dim.get());
    // Long rows average V away, so that errors of rounding show as at 4096 keys.
    check(case, &found, &exact_rows(part, &rows), 0.998, 0.05);
}

/// With one key/value head, so that it is Q, O and their codes that pass 2^31.
#[test]
#[ignore = "needs a GPU with 14 GiB free"]
fn more_elements_than_32_bits_count() {
    let kernels = kernels();
    let lengths = vec![90_001, 3, 0, 1500, 31_000, 1, 700];
    let rest = TOKENS - lengths.iter().sum::<usize>();
    let shape = Shape {
        lengths: [lengths, vec![rest]].concat(),
        heads: 136,
        kv_heads: 1,
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
    };
    let problem = pooled(shape, 2);
    assert!(problem.q.len() > 1 << 31);
    let call = Call::new(&kernels, &problem, problem.documents.len() + 1);
    call.run(&kernels);
    let found = call.raw();
    assert!(found.is_whole());
    for (document, head) in [(1, 135), (3, 0), (3, 135), (5, 70), (6, 135), (7, 134)] {
        let part = Part { document, head };
        let case = format!("{part:?}, {} rows", part.rows(&problem).len());
        let (found, problem) = (found.part(&problem, part), part.of(&problem));
        match document {
            7 => check_exact(&case, &found, &problem),
            _ => check_profile(&case, &found, &problem),
        }
    }
    for head in [0, 135] {
        let part = Part { document: 0, head };
        let (found, problem) = (found.part(&problem, part), part.of(&problem));
        check_exact(&format!("{part:?}, 90001 rows"), &found, &problem);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_document_of_131072_rows() {
    /// Rows that the CPU computes as the profile does, in a moment.
    const ROWS: usize = 1536;
    const WINDOW: usize = 900;
    let kernels = kernels();
    let shape = Shape {
        lengths: vec![TOKENS],
        heads: 4,
        kv_heads: 2,
        head_dim: HeadDim::D128,
        mask: Mask::Causal,
    };
    let mut problem = pooled(shape, 3);
    for mask in [Mask::Causal, Mask::Full, Mask::window(WINDOW)] {
        problem.shape.mask = mask;
        let call = Call::new(&kernels, &problem, 2);
        call.run(&kernels);
        let found = call.raw();
        assert!(found.is_whole(), "{mask}");
        let part = Part {
            document: 0,
            head: 3,
        };
        let (found, problem) = (found.part(&problem, part), part.of(&problem));
        check_exact(&format!("{mask}, exact"), &found, &problem);
        // Rows that see no others than each other: the first, and under a window the last but those
        // that see further back. Both start with a tile of the document.
        let dims = problem.shape.head_dim.get();
        if mask != Mask::Full {
            let first: Vec<_> = (0..ROWS).collect();
            let first = rows_of(&found, &first, dims);
            check_profile(
                &format!("{mask}, first rows"),
                &first,
                &cut(&problem, 0..ROWS),
            );
        }
        if mask == Mask::window(WINDOW) {
            let start = TOKENS - ROWS;
            let wanted = cut(&problem, start..TOKENS).on_cpu(Path::Mxfp8);
            let inside: Vec<_> = (WINDOW..ROWS).collect();
            let wanted = rows_of(&wanted, &inside, dims);
            let inside: Vec<_> = inside.iter().map(|row| start + row).collect();
            let found = rows_of(&found, &inside, dims);
            check(
                &format!("{mask}, last rows"),
                &found,
                &wanted,
                0.99999,
                1e-4,
            );
        }
    }
}
