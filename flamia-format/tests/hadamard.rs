//! The fast rotation against the Walsh-Hadamard matrix in f64.

use flamia_format::{HadamardError, hadamard, hadamard_rows};
use proptest::prelude::*;

/// Entry (i, j) of the normalised matrix: the parity of the bits that i and j share gives its sign.
fn matrix(n: usize, i: usize, j: usize) -> f64 {
    let sign = if (i & j).count_ones().is_multiple_of(2) {
        1.0
    } else {
        -1.0
    };
    sign / (n as f64).sqrt()
}

fn norm(x: &[f32]) -> f64 {
    x.iter()
        .map(|&v| f64::from(v) * f64::from(v))
        .sum::<f64>()
        .sqrt()
}

fn rows() -> impl Strategy<Value = (usize, Vec<f32>)> {
    (0u32..=8, 1usize..4).prop_flat_map(|(log, rows)| {
        let cols = 1 << log;
        (
            Just(cols),
            prop::collection::vec(-100f32..100.0, rows * cols),
        )
    })
}

proptest! {
    #[test]
    fn rows_equal_the_matrix_product((cols, x) in rows()) {
        let mut rotated = x.clone();
        hadamard_rows(&mut rotated, cols).unwrap();
        for (row, found) in x.chunks(cols).zip(rotated.chunks(cols)) {
            // log2(n) additions and two roundings of the norm, each half an ulp of at most ‖x‖.
            let bound = norm(row) * f64::from(f32::EPSILON) * (cols.ilog2() + 2) as f64;
            for (i, &found) in found.iter().enumerate() {
                let exact: f64 = row
                    .iter()
                    .enumerate()
                    .map(|(j, &v)| matrix(cols, i, j) * f64::from(v))
                    .sum();
                prop_assert!((f64::from(found) - exact).abs() <= bound, "[{i}] {found} {exact}");
            }
        }
    }

    #[test]
    fn rotating_twice_gives_the_row_back_and_keeps_its_norm((cols, x) in rows()) {
        let mut twice = x.clone();
        hadamard_rows(&mut twice, cols).unwrap();
        for (row, rotated) in x.chunks(cols).zip(twice.chunks(cols)) {
            prop_assert!((norm(row) - norm(rotated)).abs() <= 1e-6 * norm(row));
        }
        hadamard_rows(&mut twice, cols).unwrap();
        let bound = 1e-6 * norm(&x);
        for (v, back) in x.iter().zip(&twice) {
            prop_assert!(f64::from((v - back).abs()) <= bound);
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_around_it((cols, x) in rows()) {
        let mut together = x.clone();
        hadamard_rows(&mut together, cols).unwrap();
        for (row, together) in x.chunks(cols).zip(together.chunks(cols)) {
            let mut alone = row.to_vec();
            hadamard(&mut alone).unwrap();
            prop_assert_eq!(alone, together);
        }
    }
}

/// Unit vectors give the matrix's columns, whose entries are the same float up to the sign.
#[test]
fn columns_are_exact() {
    for n in [1, 2, 64, 128] {
        for j in 0..n {
            let mut x = vec![0.0; n];
            x[j] = 1.0;
            hadamard(&mut x).unwrap();
            for (i, &found) in x.iter().enumerate() {
                assert_eq!(found, matrix(n, i, j) as f32, "n = {n}, ({i}, {j})");
            }
        }
    }
}

#[test]
fn lengths_that_cannot_be_rotated_are_refused() {
    for cols in [0, 3, 96] {
        let mut x = vec![1.0; cols];
        assert_eq!(hadamard(&mut x), Err(HadamardError::NotPowerOfTwo { cols }));
        assert_eq!(x, vec![1.0; cols]);
    }
    let error = hadamard_rows(&mut [1.0; 12], 8).unwrap_err();
    assert_eq!(error, HadamardError::PartialRow { len: 12, cols: 8 });
    assert!(error.to_string().contains("12 values") && error.to_string().contains("rows of 8"));
    assert_eq!(hadamard_rows(&mut [], 8), Ok(()));
}
