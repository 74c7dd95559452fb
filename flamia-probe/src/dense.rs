//! Attention as in a textbook, in float64, one entry of P and dS at a time: what the quantisers of
//! other systems are put around, and where whole matrices can be looked at.

use std::ops::Range;

use flamia_kernels::Mask;
use flamia_sched::visible_keys;

use crate::problem::{Outputs, Problem};

/// One query row of the matrices.
pub struct Row {
    /// The keys it sees, as rows of the packed row.
    pub keys: Range<usize>,
    /// Its probabilities, one per key.
    pub p: Vec<f64>,
    /// P ∘ (dP - D), one per key, without the factor on Q·Kᵀ.
    pub ds: Vec<f64>,
    /// The log-sum-exp of its scores.
    pub lse: f64,
}

/// Query row `i`, which lies in `document`, of query head `head`.
pub fn row(problem: &Problem, document: &Range<usize>, head: usize, i: usize, mask: Mask) -> Row {
    let scale = 1.0 / (problem.head_dim as f64).sqrt();
    let seen = visible_keys(i - document.start, document.len(), mask);
    let keys = document.start + seen.start..document.start + seen.end;
    let kv_head = problem.kv_head(head);
    let (q, d_o) = (problem.q_row(i, head), problem.d_o_row(i, head));
    let s: Vec<f64> = keys
        .clone()
        .map(|j| scale * dot(q, problem.k_row(j, kv_head)))
        .collect();
    let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = s.iter().map(|s| (s - max).exp()).sum();
    let lse = max + sum.ln();
    let p: Vec<f64> = s.iter().map(|s| (s - lse).exp()).collect();
    let dp: Vec<f64> = keys
        .clone()
        .map(|j| dot(d_o, problem.v_row(j, kv_head)))
        .collect();
    let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
    let ds = p.iter().zip(&dp).map(|(p, dp)| p * (dp - mean)).collect();
    Row { keys, p, ds, lse }
}

/// Exact attention on operands that exist twice: once for the products that contract the head
/// dimension (scores and dP), and once for those that contract tokens (O, dQ, dK and dV). Without
/// rounding both are the same problem.
pub fn attention(features: &Problem, tokens: &Problem, mask: Mask) -> Outputs {
    let Problem {
        heads,
        kv_heads,
        head_dim,
        ref documents,
        ..
    } = *features;
    let rows = documents.total();
    let scale = 1.0 / (head_dim as f64).sqrt();
    let mut outputs = Outputs {
        o: vec![0.0; rows * heads * head_dim],
        lse: vec![f64::INFINITY; heads * rows],
        dq: vec![0.0; rows * heads * head_dim],
        dk: vec![0.0; rows * kv_heads * head_dim],
        dv: vec![0.0; rows * kv_heads * head_dim],
    };
    for document in documents.iter() {
        for head in 0..heads {
            let kv_head = features.kv_head(head);
            for i in document.clone() {
                let row = row(features, &document, head, i, mask);
                outputs.lse[head * rows + i] = row.lse;
                let at = (i * heads + head) * head_dim..(i * heads + head + 1) * head_dim;
                for ((j, p), ds) in row.keys.zip(row.p).zip(row.ds) {
                    let from = (j * kv_heads + kv_head) * head_dim;
                    let kv_at = from..from + head_dim;
                    let ds = ds * scale;
                    add(&mut outputs.o[at.clone()], p, tokens.v_row(j, kv_head));
                    add(&mut outputs.dq[at.clone()], ds, tokens.k_row(j, kv_head));
                    add(&mut outputs.dk[kv_at.clone()], ds, tokens.q_row(i, head));
                    add(&mut outputs.dv[kv_at], p, tokens.d_o_row(i, head));
                }
            }
        }
    }
    outputs
}

fn add(sum: &mut [f64], factor: f64, x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * f64::from(*x);
    }
}

/// With as many partial sums as vector lanes, since the compiler may not reorder one.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut sums = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use flamia_sched::Documents;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::attention::exact;
    use crate::metric::relative_error;

    #[test]
    fn one_copy_of_the_operands_gives_exact_attention() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let problem = Problem::gaussian(&[40, 0, 33], [4, 2, 64], &mut rng).unwrap();
        for mask in [Mask::Causal, Mask::Full, Mask::window(7)] {
            let (found, expected) = (
                attention(&problem, &problem, mask),
                exact(&problem, mask).unwrap(),
            );
            for (found, expected) in [
                (&found.o, &expected.o),
                (&found.lse, &expected.lse),
                (&found.dq, &expected.dq),
                (&found.dk, &expected.dk),
                (&found.dv, &expected.dv),
            ] {
                let error = relative_error(found, expected);
                assert!(error < 1e-12, "{mask}: {error:e}");
            }
        }
    }

    #[test]
    fn each_product_reads_its_own_copy() {
        let one = Problem {
            documents: Documents::single(1).unwrap(),
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            q: vec![2.0],
            k: vec![3.0],
            v: vec![5.0],
            d_o: vec![7.0],
        };
        let doubled = Problem {
            v: vec![10.0],
            d_o: vec![14.0],
            ..one.clone()
        };
        let outputs = attention(&one, &doubled, Mask::Causal);
        // A lone key has the probability 1 and no gradient of its score.
        assert_eq!((outputs.o[0], outputs.dv[0]), (10.0, 14.0));
        assert_eq!(
            (outputs.lse[0], outputs.dq[0], outputs.dk[0]),
            (6.0, 0.0, 0.0)
        );
    }
}
