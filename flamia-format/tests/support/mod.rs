//! Reads the tables that `scripts/format_tables.py` writes from ml_dtypes.
#![allow(dead_code)] // each test binary reads only some of them

pub mod element;
pub mod groups;

use std::sync::LazyLock;

/// The entries of a table: hexadecimal words, a line each.
pub fn entries(table: &str) -> impl Iterator<Item = Vec<u32>> {
    table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            line.split_whitespace()
                .map(|word| u32::from_str_radix(word, 16).unwrap())
                .collect()
        })
}

/// (bits, code) pairs.
pub fn pairs(table: &str) -> Vec<(u32, u8)> {
    entries(table)
        .map(|entry| (entry[0], entry[1] as u8))
        .collect()
}

/// The values of all codes of a format with `bits` bits, given by their f32 bits.
pub fn decoded(table: &str, bits: u32) -> Vec<f32> {
    let values: Vec<f32> = entries(table)
        .map(|entry| f32::from_bits(entry[0]))
        .collect();
    assert_eq!(values.len(), 1 << bits);
    values
}

/// The value of every E4M3 code.
pub fn e4m3_values() -> &'static [f32] {
    static VALUES: LazyLock<Vec<f32>> =
        LazyLock::new(|| decoded(include_str!("../tables/e4m3_decode.txt"), 8));
    &VALUES
}

/// The value of every E2M1 code.
pub fn e2m1_values() -> &'static [f32] {
    static VALUES: LazyLock<Vec<f32>> =
        LazyLock::new(|| decoded(include_str!("../tables/e2m1_decode.txt"), 4));
    &VALUES
}

/// Equality of bits, any NaN equal to any NaN.
pub fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[track_caller]
pub fn assert_same(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            same(found, expected),
            "[{index}]: {found:e}, expected {expected:e}"
        );
    }
}
