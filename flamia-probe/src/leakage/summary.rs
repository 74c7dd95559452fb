//! The rows of the leakage probe at a glance.

use serde::Serialize;

use super::Row;
use crate::problem::Tensor;

/// What one scheme lets through on one input, as in the paper's table 5: for each perturbed operand
/// the largest change of any result, and the farthest reach, or `unchanged` if every bit was kept.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Scaling scheme.
    pub scheme: String,
    /// The input.
    pub case: String,
    /// K perturbed.
    pub k: Option<String>,
    /// V perturbed.
    pub v: Option<String>,
    /// Q perturbed.
    pub q: Option<String>,
    /// dO perturbed.
    pub d_o: Option<String>,
}

/// One line for each scheme and input of `rows`, in their order.
pub fn summary(rows: &[Row]) -> Vec<Summary> {
    rows.chunk_by(|a, b| (&a.scheme, &a.case) == (&b.scheme, &b.case))
        .map(|rows| {
            let cell = |tensor: Tensor| {
                let rows = rows
                    .iter()
                    .filter(|row| row.perturbed == tensor.to_string());
                let worst = rows.fold(None, |worst: Option<Row>, row| match worst {
                    None => Some(row.clone()),
                    Some(mut worst) => {
                        worst.join(row);
                        Some(worst)
                    }
                })?;
                Some(match worst.bitwise {
                    true => "unchanged".into(),
                    false => format!("{:.1e}, {} rows", worst.change, worst.reach),
                })
            };
            Summary {
                scheme: rows[0].scheme.clone(),
                case: rows[0].case.clone(),
                k: cell(Tensor::K),
                v: cell(Tensor::V),
                q: cell(Tensor::Q),
                d_o: cell(Tensor::DO),
            }
        })
        .collect()
}
