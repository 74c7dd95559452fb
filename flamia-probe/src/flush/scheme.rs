//! The roundings whose losses are counted.

use flamia_format::{Element, ExponentRule, e4m3, nvfp4_round_in_place, round_group};

use super::count::{Count, count};

/// How a matrix is rounded: what shares a scale, and how a group is rounded under it.
pub struct Scheme {
    /// Its name in the rows.
    pub name: &'static str,
    /// Rows and columns that share a scale; `usize::MAX` for all.
    pub group: [usize; 2],
    round: fn(&mut [f32]),
}

impl Scheme {
    const fn new(name: &'static str, group: [usize; 2], round: fn(&mut [f32])) -> Self {
        Self { name, group, round }
    }

    /// What it rounds to zero in a row-major matrix of `cols` columns.
    pub fn count(&self, matrix: &[f32], cols: usize) -> Count {
        count(matrix, cols, self.group, self.round)
    }
}

/// Queries by keys.
pub const DS: [Scheme; 7] = [
    Scheme::new("e4m3 32x32", [32, 32], mxfp8),
    Scheme::new("e4m3 1 query x 128 keys", [1, 128], mxfp8),
    Scheme::new("e4m3 32 queries x 128 keys", [32, 128], mxfp8),
    Scheme::new("e4m3 64 queries x 128 keys", [64, 128], mxfp8),
    Scheme::new("e4m3 all queries x 32 keys", [usize::MAX, 32], mxfp8),
    Scheme::new("e4m3 whole matrix", [usize::MAX; 2], mxfp8),
    Scheme::new("mxfp4 1 query x 32 keys", [1, 32], mxfp4),
];

/// Queries by keys, entries relative to the largest of their query. Entries at a fixed scale are
/// their own group.
pub const P: [Scheme; 5] = [
    Scheme::new("e4m3 x 1", [1, 1], |x| fixed(x, 1.0)),
    Scheme::new("e4m3 x 2^4", [1, 1], |x| fixed(x, 16.0)),
    Scheme::new("e4m3 x 2^8", [1, 1], |x| fixed(x, 256.0)),
    Scheme::new("nvfp4 1 query x 16 keys", [1, 16], nvfp4),
    Scheme::new("mxfp4 1 query x 32 keys", [1, 32], mxfp4),
];

/// Rows by features.
pub const D_O: [Scheme; 3] = [
    Scheme::new("e4m3 32 rows", [32, usize::MAX], mxfp8),
    Scheme::new("e4m3 unscaled", [1, 1], |x| fixed(x, 1.0)),
    Scheme::new("nvfp4 unscaled", [1, 16], nvfp4),
];

fn mxfp8(group: &mut [f32]) {
    round_group(group, Element::E4M3, ExponentRule::Up);
}

fn mxfp4(group: &mut [f32]) {
    round_group(group, Element::E2M1, ExponentRule::Up);
}

/// A document's last group may be short; what is missing is zero.
fn nvfp4(group: &mut [f32]) {
    let mut whole = [0.0; 16];
    whole[..group.len()].copy_from_slice(group);
    nvfp4_round_in_place(&mut whole, 16);
    group.copy_from_slice(&whole[..group.len()]);
}

fn fixed(group: &mut [f32], scale: f32) {
    for x in group {
        *x = e4m3::round(*x * scale);
    }
}
