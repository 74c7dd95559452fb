//! Random shapes, and operands that are less even than Gaussian ones.

use flamia_kernels::Mask;
use half::bf16;
use rand::{Rng, RngExt};

use super::{HEAD_DIMS, Problem, Shape};

/// A length that likes the edges of blocks, warpgroups, tiles and items.
pub fn edgy_length(rng: &mut impl Rng) -> usize {
    const EDGES: [usize; 8] = [0, 1, 32, 64, 128, 192, 256, 384];
    match rng.random_range(0..3) {
        0 => rng.random_range(0..450),
        1 => EDGES[rng.random_range(0..EDGES.len())],
        _ => (EDGES[rng.random_range(1..EDGES.len())] + rng.random_range(0..3)).saturating_sub(1),
    }
}

pub fn random_shape(rng: &mut impl Rng) -> Shape {
    let lengths: Vec<_> = (0..rng.random_range(1..7))
        .map(|_| edgy_length(rng))
        .collect();
    let kv_heads = rng.random_range(1..3);
    let groups = [1, 2, 3, 4, 8, 16];
    let longest = lengths.iter().copied().max().unwrap_or_default().max(1);
    Shape {
        lengths,
        heads: kv_heads * groups[rng.random_range(0..if kv_heads == 1 { 6 } else { 3 })],
        kv_heads,
        head_dim: HEAD_DIMS[rng.random_range(0..2)],
        mask: match rng.random_range(0..4) {
            0 => Mask::Full,
            1 => Mask::window(rng.random_range(1..=longest + 40)),
            _ => Mask::Causal,
        },
    }
}

/// Operands at sizes that differ from run to run of rows: zeros, and exponents far apart.
pub fn roughen(problem: &mut Problem, rng: &mut impl Rng) {
    let tokens = problem.tokens();
    let dims = problem.shape.head_dim.get();
    let heads = [
        problem.shape.heads,
        problem.shape.kv_heads,
        problem.shape.kv_heads,
    ];
    for (i, (data, heads)) in [&mut problem.q, &mut problem.k, &mut problem.v]
        .into_iter()
        .zip(heads)
        .enumerate()
    {
        let mut start = 0;
        while start < tokens {
            let end = tokens.min(start + rng.random_range(1..90));
            let spread = if i == 2 { 30 } else { 2 };
            let scale = match rng.random_range(0..6) {
                0 => 0.0,
                1 | 2 => 2f32.powi(rng.random_range(-spread..=spread)),
                _ => 1.0,
            };
            for x in &mut data[start * heads * dims..end * heads * dims] {
                *x = bf16::from_f32(x.to_f32() * scale);
            }
            start = end;
        }
    }
}

/// A hundred random problems but for the empty ones: number, whether it was roughened, and a seed for what else
/// it takes.
pub fn random_problems(rng: &mut impl Rng) -> Vec<(usize, bool, Problem, u64)> {
    let mut problems = Vec::new();
    for number in 0..100 {
        let mut problem = Problem::gaussian(random_shape(rng), rng);
        if problem.tokens() == 0 {
            continue;
        }
        let is_rough = number % 4 == 3;
        if is_rough {
            roughen(&mut problem, rng);
        }
        problems.push((number, is_rough, problem, rng.random()));
    }
    assert!(problems.len() > 90, "empty rows say nothing");
    problems
}
