//! `probe flush`: the share of dS, P and dO that a scheme rounds to zero.

mod count;
mod scheme;

use std::ops::Range;

use flamia_kernels::Mask;
use flamia_sched::Documents;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use serde::Serialize;

pub use count::{Count, count};
pub use scheme::{D_O, DS, P, Scheme};

use crate::capture;
use crate::dense;
use crate::error::ProbeError;
use crate::problem::{Problem, Tensor};
use crate::progress::Progress;

/// Count the entries of dS, P and dO that each scheme rounds to zero
///
/// A scale that is too large for most of its group rounds small gradients to zero. Cosines do not show
/// it (all of these schemes stay at 0.999), but training quality follows it: in the paper's ablation the
/// loss gap to BF16 grows from 0.0008 to 0.049 as the share in dS rises from 0.4 % to 29 % (section
/// 4.5). Compare the shapes of dS's scale groups: finer is better, and along a query row best.
///
/// `lost_groups` are groups of which nothing is left: with a UE4M3 scale per 16 entries of P those are
/// 63 to 89 % of a trained model's (appendix A.1), and an unscaled dO loses 97 % of its entries in
/// E4M3 and all of them in NVFP4 at the magnitude that gradients have.
///
/// Every matrix is computed in float64 from unrounded operands, under the causal mask.
#[derive(Clone, Debug, clap::Args)]
pub struct Flush {
    /// Inputs: gaussian, q-x3 (Q three times as large), q-x2-log-normal (Q twice as large, dO's rows
    /// log-normal with sigma 2), capture:FILE
    #[arg(
        long = "input",
        value_name = "INPUTS",
        value_delimiter = ',',
        default_value = "gaussian,q-x3,q-x2-log-normal"
    )]
    pub inputs: Vec<Input>,

    /// Seed of what is drawn
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Length of the one document that is drawn
    #[arg(long, default_value_t = 2048)]
    pub length: usize,

    /// Heads that are drawn
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub heads: usize,

    /// Features of a head that is drawn
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_dim: usize,

    /// Root mean square that dO is brought to before its own schemes round it; real gradients are
    /// about this small
    #[arg(long, value_name = "RMS", default_value_t = 4.5e-4)]
    pub gradient: f64,
}

/// What attention is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Standard normal operands.
    Gaussian,
    /// Q three times as large: a model that is sure of what it looks at.
    Peaked,
    /// Q twice as large, and rows of dO that differ by log-normal factors with sigma 2.
    LogNormal,
    /// Every layer of a file that `probe capture` wrote.
    Capture(std::path::PathBuf),
}

impl std::str::FromStr for Input {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match (name, name.strip_prefix("capture:")) {
            ("gaussian", _) => Ok(Self::Gaussian),
            ("q-x3", _) => Ok(Self::Peaked),
            ("q-x2-log-normal", _) => Ok(Self::LogNormal),
            (_, Some(file)) if !file.is_empty() => Ok(Self::Capture(file.into())),
            _ => Err("use `gaussian`, `q-x3`, `q-x2-log-normal` or `capture:FILE`".into()),
        }
    }
}

/// One scheme on one input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `gaussian`, `q-x3`, `q-x2-log-normal`, or a layer of a capture.
    pub input: String,
    /// `ds`, `p` or `d_o`.
    pub tensor: &'static str,
    /// Element format, and what shares a scale or the fixed scale.
    pub scheme: &'static str,
    /// The share of nonzero entries that were rounded to zero, over all heads.
    pub fraction: f64,
    /// The same in the head with the smallest share.
    pub lowest: f64,
    /// And in the head with the largest.
    pub highest: f64,
    /// The share of scale groups of which nothing is left.
    pub lost_groups: f64,
}

impl Flush {
    /// A row for each input, tensor and scheme.
    ///
    /// # Errors
    /// A capture that cannot be read, a gradient that is no positive number.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        if !(self.gradient.is_finite() && self.gradient > 0.0) {
            return Err(ProbeError::Setting {
                setting: "gradient",
                found: self.gradient.to_string(),
                expected: "a root mean square is a positive number".into(),
            });
        }
        let problems = self.problems()?;
        let progress = Progress::new(problems.iter().map(|(_, problem)| problem.heads).sum());
        let mut rows = Vec::new();
        for (input, problem) in &problems {
            progress.at(input);
            let gradient = self.gradient / rms(&problem.d_o);
            let heads: Vec<HeadCounts> = (0..problem.heads)
                .map(|head| {
                    let counts = head_counts(problem, head, gradient);
                    progress.step();
                    counts
                })
                .collect();
            for (tensor, schemes) in [("ds", DS.as_slice()), ("p", &P), ("d_o", &D_O)] {
                for (at, scheme) in schemes.iter().enumerate() {
                    let of = |head: &HeadCounts| match tensor {
                        "ds" => head.ds[at],
                        "p" => head.p[at],
                        _ => head.d_o[at],
                    };
                    rows.push(Row::new(input, tensor, scheme.name, heads.iter().map(of)));
                }
            }
        }
        Ok(rows)
    }

    fn problems(&self) -> Result<Vec<(String, Problem)>, ProbeError> {
        let shape = [self.heads, self.heads, self.head_dim];
        let mut problems = Vec::new();
        for input in &self.inputs {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            let mut draw = || Problem::gaussian(&[self.length], shape, &mut rng);
            match input {
                Input::Gaussian => problems.push(("gaussian".into(), draw()?)),
                Input::Peaked => {
                    let mut problem = draw()?;
                    problem.scale(Tensor::Q, |_, _, _| 3.0);
                    problems.push(("q-x3".into(), problem));
                }
                Input::LogNormal => {
                    let mut problem = draw()?;
                    problem.scale(Tensor::Q, |_, _, _| 2.0);
                    let factors: Vec<f32> = (0..problem.rows() * problem.heads)
                        .map(|_| {
                            let normal: f32 = StandardNormal.sample(&mut rng);
                            (2.0 * normal).exp()
                        })
                        .collect();
                    let heads = problem.heads;
                    problem.scale(Tensor::DO, |row, head, _| factors[row * heads + head]);
                    problems.push(("q-x2-log-normal".into(), problem));
                }
                Input::Capture(file) => {
                    let layers = capture::read(file)?.into_iter().enumerate();
                    problems.extend(layers.map(|(n, layer)| (format!("capture layer {n}"), layer)));
                }
            }
        }
        Ok(problems)
    }
}

impl Row {
    fn new(
        input: &str,
        tensor: &'static str,
        scheme: &'static str,
        heads: impl Iterator<Item = Count>,
    ) -> Self {
        let (mut total, mut lowest, mut highest) = (Count::default(), 1.0f64, 0.0f64);
        for head in heads {
            lowest = lowest.min(head.fraction());
            highest = highest.max(head.fraction());
            total += head;
        }
        Self {
            input: input.to_owned(),
            tensor,
            scheme,
            fraction: total.fraction(),
            lowest,
            highest,
            lost_groups: total.lost_groups(),
        }
    }
}

/// By scheme.
#[derive(Default)]
struct HeadCounts {
    ds: [Count; DS.len()],
    p: [Count; P.len()],
    d_o: [Count; D_O.len()],
}

/// Blocks are counted from each document's start.
fn head_counts(problem: &Problem, head: usize, gradient: f64) -> HeadCounts {
    let mut counts = HeadCounts::default();
    let documents: &Documents = &problem.documents;
    for document in documents.iter().filter(|document| !document.is_empty()) {
        let [p, ds] = matrices(problem, &document, head);
        let d_o: Vec<f32> = document
            .clone()
            .flat_map(|row| problem.d_o_row(row, head))
            .map(|x| (f64::from(*x) * gradient) as f32)
            .collect();
        add(&mut counts.ds, &DS, &ds, document.len());
        add(&mut counts.p, &P, &p, document.len());
        add(&mut counts.d_o, &D_O, &d_o, problem.head_dim);
    }
    counts
}

fn add(counts: &mut [Count], schemes: &[Scheme], matrix: &[f32], cols: usize) {
    counts
        .par_iter_mut()
        .zip(schemes)
        .for_each(|(sum, scheme)| *sum += scheme.count(matrix, cols));
}

/// P, each row relative to its largest entry, and dS, both queries by keys with zeros where the mask
/// hides a key.
fn matrices(problem: &Problem, document: &Range<usize>, head: usize) -> [Vec<f32>; 2] {
    let len = document.len();
    let mut p = vec![0.0f32; len * len];
    let mut ds = vec![0.0f32; len * len];
    p.par_chunks_mut(len)
        .zip(ds.par_chunks_mut(len))
        .zip(document.clone())
        .for_each(|((p, ds), i)| {
            let row = dense::row(problem, document, head, i, Mask::Causal);
            let max = row.p.iter().copied().fold(0.0, f64::max);
            for (j, (p_ij, ds_ij)) in row.p.iter().zip(&row.ds).enumerate() {
                p[j] = (p_ij / max) as f32;
                ds[j] = *ds_ij as f32;
            }
        });
    [p, ds]
}

fn rms(x: &[f32]) -> f64 {
    let sum: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    (sum / x.len() as f64).sqrt()
}
