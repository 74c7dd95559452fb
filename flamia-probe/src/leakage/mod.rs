//! `probe leakage`: what an earlier result knows of a later token.

mod measure;
mod public;
mod scheme;
mod summary;

use std::collections::BTreeMap;

use flamia_kernels::Mask;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

pub use measure::{Perturbation, Trace, compare, measure};
pub use scheme::{Scheme, schemes};
pub use summary::{Summary, summary};

use crate::error::ProbeError;
use crate::input::Inputs;
use crate::problem::{Problem, Tensor};
use crate::progress::Progress;

/// Change a later token, and see what earlier results know of it
///
/// One element of K, V, Q or dO is raised above every other, so that the maximum of its scale group
/// rises; then the results that must not depend on that token are compared bit for bit (paper,
/// sections 3.2 and 4.5, table 5): O, LSE and dQ of earlier rows, dK and dV of keys that the token's
/// query cannot see, and everything of other documents. The table shows, for each raised operand, the
/// largest change as a share of the largest element, and how many rows away it reaches; the JSON has
/// every result apart.
///
/// Scales that cover 32 tokens leave a residue that reaches at most 31 rows, and dQ's FP16 accumulator
/// one that can reach over the document: the `-exact` schemes leave neither. Per-tensor scales,
/// exponents rounded by the floor rule, and 4-bit V grouped across the diagonal leak visibly.
/// `1x32-v-along-keys` has the scales of cuDNN's MXFP8, `1x32-both` those of Low Precision FA4, around
/// exact attention. What `fp4` shows for Q and dO runs from earlier to later queries of a group.
///
/// The `public` cases: 128 keys, V zero but for 2^-20 at key 0, then 1.0 at key 16 (in its block of
/// 32) or at key 32 (in the next). In the JSON, `before` and `after` are the largest elements of the
/// earlier rows.
#[derive(Clone, Debug, clap::Args)]
pub struct Leakage {
    /// Schemes to probe [default: all]
    #[arg(long = "scheme", value_name = "SCHEMES", value_delimiter = ',')]
    pub schemes: Vec<String>,

    /// Operands.
    #[command(flatten)]
    pub inputs: Inputs,

    /// Lengths of the documents that are drawn
    #[arg(long, value_delimiter = ',', default_value = "160,96")]
    pub lengths: Vec<usize>,

    /// Query heads that are drawn
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub heads: usize,

    /// Key/value heads that are drawn
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub kv_heads: usize,

    /// Features of a head that is drawn: 64, 96, 128, 256
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_dim: usize,

    /// Rows that are used, from the start of the input
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub rows: usize,

    /// Perturbations of each operand
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub trials: usize,

    /// How many times as large as any other a raised element may be; drawn log-uniformly from 2 on
    #[arg(long, default_value_t = 16.0)]
    pub factor: f32,
}

/// What became of one result of one scheme.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Scaling scheme.
    pub scheme: String,
    /// The input, or `public: key 16` and `public: key 32`.
    pub case: String,
    /// The perturbed operand: `q`, `k`, `v` or `d_o`.
    pub perturbed: String,
    /// The result looked at: `o`, `lse`, `dq`, `dk` or `dv`.
    pub tensor: &'static str,
    /// The largest change among the rows that must not depend on the perturbed token, as a share of
    /// their largest magnitude; null where it made something NaN.
    pub change: f64,
    /// How many rows away the farthest changed row lies; 0 if none changed.
    pub reach: usize,
    /// Whether every bit is as it was, in every trial.
    pub bitwise: bool,
    /// The largest magnitude among those rows before, in the trial of the largest change.
    pub before: f64,
    /// The largest magnitude among them after.
    pub after: f64,
    /// Perturbations tried.
    pub trials: usize,
}

impl Leakage {
    /// A row for each scheme, input, perturbed operand and result. `more` are schemes beside those of
    /// [`schemes`].
    ///
    /// # Errors
    /// An unknown scheme, inputs that cannot be read, an attention that fails.
    pub fn rows(&self, more: Vec<Scheme>) -> Result<Vec<Row>, ProbeError> {
        let mut schemes = schemes(Mask::Causal);
        schemes.extend(more);
        let mut schemes = self.chosen(schemes)?;
        if self.factor.is_nan() || self.factor < 2.0 {
            return Err(ProbeError::Setting {
                setting: "factor",
                found: self.factor.to_string(),
                expected: "a maximum rises by a factor of 2 or more".into(),
            });
        }
        let shape = [self.heads, self.kv_heads, self.head_dim];
        let mut problems = self
            .inputs
            .problems(std::slice::from_ref(&self.lengths), shape)?;
        for (_, problem) in &mut problems {
            *problem = problem.first(self.rows);
        }
        let progress = Progress::new(schemes.len() * (problems.len() + 1));
        let mut rows = Vec::new();
        for scheme in &mut schemes {
            for (input, problem) in &problems {
                progress.at(format_args!("{} {input}", scheme.name));
                rows.extend(self.trials(scheme, input, problem)?);
                progress.step();
            }
            rows.extend(public::rows(scheme, self.inputs.seed)?);
            progress.step();
        }
        Ok(rows)
    }

    fn chosen(&self, all: Vec<Scheme>) -> Result<Vec<Scheme>, ProbeError> {
        let names: Vec<&str> = all.iter().map(|scheme| scheme.name).collect();
        if let Some(unknown) = self
            .schemes
            .iter()
            .find(|name| !names.contains(&name.as_str()))
        {
            return Err(ProbeError::Setting {
                setting: "scheme",
                found: unknown.clone(),
                expected: format!("the schemes are {}", names.join(", ")),
            });
        }
        let wanted = |scheme: &Scheme| {
            self.schemes.is_empty() || self.schemes.iter().any(|name| name == scheme.name)
        };
        Ok(all.into_iter().filter(wanted).collect())
    }

    fn trials(
        &self,
        scheme: &mut Scheme,
        case: &str,
        problem: &Problem,
    ) -> Result<Vec<Row>, ProbeError> {
        // The same perturbations for every scheme.
        let mut rng = ChaCha8Rng::seed_from_u64(self.inputs.seed ^ 0x6c65_616b);
        let before = scheme.attend(problem)?;
        let mut rows = Vec::new();
        for tensor in Tensor::ALL {
            let mut worst = BTreeMap::new();
            for _ in 0..self.trials {
                let Some(perturbation) =
                    Perturbation::random(problem, tensor, self.factor, &mut rng)
                else {
                    continue;
                };
                let after = scheme.attend(&perturbation.apply(problem))?;
                for (at, trace) in compare(problem, Mask::Causal, &perturbation, &before, &after)
                    .into_iter()
                    .enumerate()
                {
                    let row = Row::new(scheme, case, tensor, trace);
                    worst
                        .entry(at)
                        .and_modify(|known: &mut Row| known.join(&row))
                        .or_insert(row);
                }
            }
            rows.extend(worst.into_values());
        }
        Ok(rows)
    }
}

impl Row {
    fn new(scheme: &Scheme, case: &str, perturbed: Tensor, trace: Trace) -> Self {
        Self {
            scheme: scheme.name.into(),
            case: case.into(),
            perturbed: perturbed.to_string(),
            tensor: trace.tensor,
            change: trace.change,
            reach: trace.reach,
            bitwise: trace.bitwise,
            before: trace.before,
            after: trace.after,
            trials: 1,
        }
    }

    /// Takes another trial of the same result in.
    fn join(&mut self, other: &Row) {
        if other.change > self.change || other.change.is_nan() {
            (self.change, self.before, self.after) = (other.change, other.before, other.after);
        }
        self.reach = self.reach.max(other.reach);
        self.bitwise &= other.bitwise;
        self.trials += other.trials;
    }
}
