//! What an attention's results know of a token that they must not depend on.

use flamia_kernels::Mask;
use flamia_sched::visible_keys;
use half::bf16;
use rand::{Rng, RngExt};

use crate::metric::largest;
use crate::problem::{Outputs, Problem, Tensor};

/// One element of one operand set to another value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perturbation {
    /// The operand.
    pub tensor: Tensor,
    /// Row of the packed row.
    pub row: usize,
    /// Head of the operand.
    pub head: usize,
    /// Feature of the head.
    pub feature: usize,
    /// The new value.
    pub value: f32,
}

impl Perturbation {
    /// At a random place of `tensor` that has an earlier row in its document, a value that is between
    /// 2 and `factor` times as large as any element of the tensor: whatever scale group the element
    /// lies in, the group's maximum rises. `None` if every document has at most one row.
    pub fn random(
        problem: &Problem,
        tensor: Tensor,
        factor: f32,
        rng: &mut impl Rng,
    ) -> Option<Self> {
        let rows: Vec<usize> = problem
            .documents
            .iter()
            .flat_map(|document| document.skip(1))
            .collect();
        if rows.is_empty() {
            return None;
        }
        let power = rng.random_range(1.0..=f64::from(factor).log2().max(1.0));
        let sign = if rng.random_bool(0.5) { 1.0 } else { -1.0 };
        let amax = largest(problem.tensor(tensor).iter().map(|x| f64::from(*x)));
        Some(Self {
            tensor,
            row: rows[rng.random_range(0..rows.len())],
            head: rng.random_range(0..problem.heads_of(tensor)),
            feature: rng.random_range(0..problem.head_dim),
            value: bf16::from_f64(sign * power.exp2() * amax.max(f64::MIN_POSITIVE)).to_f32(),
        })
    }

    /// The problem with this one element changed.
    pub fn apply(&self, problem: &Problem) -> Problem {
        let mut changed = problem.clone();
        let row = self.row * problem.heads_of(self.tensor) + self.head;
        changed.tensor_mut(self.tensor)[row * problem.head_dim + self.feature] = self.value;
        changed
    }
}

/// What of one result changed that must not depend on the perturbed token.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// `o`, `lse`, `dq`, `dk` or `dv`.
    pub tensor: &'static str,
    /// The largest change of an element, as a share of the largest magnitude among those elements
    /// before. NaN if a change made something NaN.
    pub change: f64,
    /// How many rows away from the perturbed one the farthest changed row lies; 0 if none changed.
    pub reach: usize,
    /// Whether every bit is as it was.
    pub bitwise: bool,
    /// The largest magnitude among those elements before.
    pub before: f64,
    /// The largest magnitude among them after.
    pub after: f64,
}

/// Runs `attend` before and after the perturbation and reports, for every result that has rows which
/// must not depend on the perturbed token, what became of them:
///
/// * rows of O, LSE and dQ that lie before the token, or in another document;
/// * rows of dK and dV whose keys the token's query cannot see, if Q or dO was perturbed; if K or V
///   was, those with no query that sees both.
///
/// Under the full mask only other documents are left. A result that `attend` leaves empty is skipped.
///
/// ```
/// use flamia_probe::leakage::{Perturbation, measure};
/// use flamia_probe::{Problem, Tensor, attention};
/// use flamia_kernels::{Mask, Options, Path};
/// # use rand::SeedableRng;
/// # let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(0);
///
/// let problem = Problem::gaussian(&[64], [1, 1, 64], &mut rng)?;
/// let perturbation = Perturbation {
///     tensor: Tensor::V,
///     row: 40,
///     head: 0,
///     feature: 3,
///     value: 1000.0,
/// };
/// // Any attention will do: a kernel of your own goes into the closure.
/// let options = Options::new(Path::Mxfp8, Mask::Causal).exact();
/// for trace in measure(&problem, Mask::Causal, &perturbation, |problem| {
///     attention::attend(problem, &options)
/// })? {
///     assert!(trace.bitwise, "{trace:?}");
/// }
/// # Ok::<(), flamia_probe::ProbeError>(())
/// ```
///
/// # Errors
/// Those of `attend`.
pub fn measure<E>(
    problem: &Problem,
    mask: Mask,
    perturbation: &Perturbation,
    mut attend: impl FnMut(&Problem) -> Result<Outputs, E>,
) -> Result<Vec<Trace>, E> {
    let before = attend(problem)?;
    let after = attend(&perturbation.apply(problem))?;
    Ok(compare(problem, mask, perturbation, &before, &after))
}

/// What [`measure`] reports, of results that are there already.
pub fn compare(
    problem: &Problem,
    mask: Mask,
    perturbation: &Perturbation,
    before: &Outputs,
    after: &Outputs,
) -> Vec<Trace> {
    let Problem {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *problem;
    let rows = problem.rows();
    let query_rows = independent_rows(problem, mask, perturbation, Side::Query);
    let key_rows = independent_rows(problem, mask, perturbation, Side::Key);
    let rowwise = |heads: usize| {
        let token = heads * head_dim;
        move |row: usize| row * token..(row + 1) * token
    };
    let lse = |row: usize| (row..heads * rows).step_by(rows);
    let at = perturbation.row;
    [
        trace("o", &before.o, &after.o, &query_rows, rowwise(heads), at),
        trace("lse", &before.lse, &after.lse, &query_rows, lse, at),
        trace("dq", &before.dq, &after.dq, &query_rows, rowwise(heads), at),
        trace(
            "dk",
            &before.dk,
            &after.dk,
            &key_rows,
            rowwise(kv_heads),
            at,
        ),
        trace(
            "dv",
            &before.dv,
            &after.dv,
            &key_rows,
            rowwise(kv_heads),
            at,
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn trace<I: Iterator<Item = usize>>(
    tensor: &'static str,
    before: &[f64],
    after: &[f64],
    rows: &[usize],
    elements: impl Fn(usize) -> I,
    perturbed: usize,
) -> Option<Trace> {
    if before.is_empty() || rows.is_empty() {
        return None;
    }
    let all = || rows.iter().flat_map(|&row| elements(row));
    let bits_differ = |at: usize| before[at].to_bits() != after[at].to_bits();
    let changed = rows.iter().filter(|&&row| elements(row).any(bits_differ));
    let reach = changed.map(|row| row.abs_diff(perturbed)).max();
    let scale = largest(all().map(|at| before[at]));
    let difference = largest(
        all()
            .filter(|&at| bits_differ(at))
            .map(|at| after[at] - before[at]),
    );
    Some(Trace {
        tensor,
        change: if difference == 0.0 {
            0.0
        } else {
            difference / scale
        },
        reach: reach.unwrap_or(0),
        bitwise: reach.is_none(),
        before: scale,
        after: largest(all().map(|at| after[at])),
    })
}

enum Side {
    /// O, LSE and dQ.
    Query,
    /// dK and dV.
    Key,
}

/// Rows that must not depend on the perturbed token, in the results of one side.
fn independent_rows(
    problem: &Problem,
    mask: Mask,
    perturbation: &Perturbation,
    side: Side,
) -> Vec<usize> {
    let token = perturbation.row;
    let mut rows = Vec::new();
    for document in problem.documents.iter() {
        if !document.contains(&token) {
            rows.extend(document);
            continue;
        }
        let sees = |query: usize, key: usize| {
            visible_keys(query - document.start, document.len(), mask)
                .contains(&(key - document.start))
        };
        let key_side = matches!(perturbation.tensor, Tensor::K | Tensor::V);
        rows.extend(document.clone().filter(|&row| {
            match (&side, key_side) {
                (Side::Query, _) => row < token && !sees(row, token),
                (Side::Key, false) => !sees(token, row),
                (Side::Key, true) => !document
                    .clone()
                    .any(|query| sees(query, token) && sees(query, row)),
            }
        }));
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::dense;

    fn problem() -> Problem {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        Problem::gaussian(&[20, 12], [2, 1, 16], &mut rng).unwrap()
    }

    fn perturbation(tensor: Tensor) -> Perturbation {
        Perturbation {
            tensor,
            row: 11,
            head: 0,
            feature: 2,
            value: 50.0,
        }
    }

    fn traces(
        tensor: Tensor,
        mask: Mask,
        mut attend: impl FnMut(&Problem) -> Outputs,
    ) -> Vec<Trace> {
        let attend = |problem: &Problem| Ok::<_, Infallible>(attend(problem));
        measure(&problem(), mask, &perturbation(tensor), attend).unwrap()
    }

    #[test]
    fn exact_attention_keeps_every_bit() {
        for mask in [Mask::Causal, Mask::Full, Mask::window(4)] {
            for tensor in Tensor::ALL {
                let exact = |problem: &Problem| dense::attention(problem, problem, mask);
                let traces = traces(tensor, mask, exact);
                assert_eq!(traces.len(), 5, "the other document is there always");
                for trace in traces {
                    assert!(
                        trace.bitwise && trace.change == 0.0,
                        "{mask} {tensor} {trace:?}"
                    );
                    assert_eq!((trace.reach, trace.before), (0, trace.after));
                }
            }
        }
    }

    /// An output that mixes a trace of the last row of a group of four into all rows of the group.
    #[test]
    fn a_known_leak_is_measured() {
        let leaky = |problem: &Problem| {
            let mut outputs = dense::attention(problem, problem, Mask::Causal);
            outputs.o.fill(0.0);
            for row in 0..problem.rows() {
                let last = row | 3;
                outputs.o[row * 32] = 1.0 + f64::from(problem.v_row(last, 0)[2]) / 1000.0;
            }
            outputs
        };
        let traces = traces(Tensor::V, Mask::Causal, leaky);
        let o = &traces[0];
        assert_eq!((o.tensor, o.bitwise, o.reach), ("o", false, 3));
        let before = f64::from(problem().v_row(11, 0)[2]);
        assert!((o.change * o.before - (50.0 - before).abs() / 1000.0).abs() < 1e-12);
        assert!(o.after > 1.04);
        assert!(traces[1..].iter().all(|trace| trace.bitwise));
    }

    #[test]
    fn what_the_mask_lets_see_is_no_leak() {
        // A mean over the whole document leaks under the causal mask, and is right under the full one.
        let mean = |problem: &Problem| {
            let mut outputs = dense::attention(problem, problem, Mask::Causal);
            let sum: f64 = (0..20).map(|row| f64::from(problem.v_row(row, 0)[2])).sum();
            outputs.o[..20 * 32].fill(sum);
            outputs
        };
        assert_eq!(traces(Tensor::V, Mask::Causal, mean)[0].reach, 11);
        assert!(traces(Tensor::V, Mask::Full, mean)[0].bitwise);
    }

    #[test]
    fn rows_are_independent_as_the_mask_says() {
        let rows = |tensor, mask, side| {
            independent_rows(&problem(), mask, &perturbation(tensor), side)
                .into_iter()
                .filter(|&row| row < 20)
                .collect::<Vec<_>>()
        };
        let before = (0..11).collect::<Vec<_>>();
        let after = (12..20).collect::<Vec<_>>();
        assert_eq!(rows(Tensor::V, Mask::Causal, Side::Query), before);
        assert!(rows(Tensor::V, Mask::Causal, Side::Key).is_empty());
        assert_eq!(rows(Tensor::DO, Mask::Causal, Side::Key), after);
        let window = Mask::window(3);
        let far: Vec<usize> = (0..9).chain(14..20).collect();
        assert_eq!(rows(Tensor::K, window, Side::Key), far);
        let unseen: Vec<usize> = (0..9).chain(12..20).collect();
        assert_eq!(rows(Tensor::Q, window, Side::Key), unseen);
    }

    #[test]
    fn a_perturbation_raises_every_maximum() {
        let problem = problem();
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for tensor in Tensor::ALL {
            let p = Perturbation::random(&problem, tensor, 64.0, &mut rng).unwrap();
            let changed = p.apply(&problem);
            let amax =
                |problem: &Problem| largest(problem.tensor(tensor).iter().map(|x| f64::from(*x)));
            assert!(amax(&changed) >= 1.9 * amax(&problem));
            assert!(p.row != 0 && p.row != 20);
            let differ = problem.tensor(tensor).iter().zip(changed.tensor(tensor));
            assert_eq!(differ.filter(|(a, b)| a != b).count(), 1);
        }
        let single = Problem::gaussian(&[1, 1], [1, 1, 16], &mut rng).unwrap();
        assert!(Perturbation::random(&single, Tensor::V, 64.0, &mut rng).is_none());
    }
}
