//! The public case: one value that the block's scale can lose.

use flamia_kernels::Mask;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::{Perturbation, Row, Scheme, measure};
use crate::error::ProbeError;
use crate::problem::{Problem, Tensor};

const KEYS: usize = 128;
const HEAD_DIM: usize = 128;

/// V is zero but for one element of 2^-20 at key 0; then 1.0 appears at key 16, which shares key 0's
/// block of 32, or at key 32, which does not.
pub(super) fn rows(scheme: &mut Scheme, seed: u64) -> Result<Vec<Row>, ProbeError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut problem = Problem::gaussian(&[KEYS], [1, 1, HEAD_DIM], &mut rng)?;
    problem.v.fill(0.0);
    problem.v[0] = 2f32.powi(-20);
    let mut rows = Vec::new();
    for key in [16, 32] {
        let perturbation = Perturbation {
            tensor: Tensor::V,
            row: key,
            head: 0,
            feature: 0,
            value: 1.0,
        };
        let traces = measure(&problem, Mask::Causal, &perturbation, |problem| {
            scheme.attend(problem)
        })?;
        let case = format!("public: key {key}");
        rows.extend(
            traces
                .into_iter()
                .filter(|trace| trace.tensor == "o")
                .map(|trace| Row::new(scheme, &case, Tensor::V, trace)),
        );
    }
    Ok(rows)
}
