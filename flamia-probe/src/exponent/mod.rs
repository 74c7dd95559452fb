//! `probe exponent`: the exponentials that are cheaper than exact ones.

mod attended;
mod codes;
mod curve;

use std::path::PathBuf;

use serde::Serialize;

use crate::error::ProbeError;
use crate::progress::Progress;

pub use codes::{Affine, Scores, exact_code, mitchell_code};
pub use curve::{Curve, EXPONENTIALS, errors, svg};

/// Compare the cheap exponentials with 2^x
///
/// Mitchell-P (paper, appendix C.1) builds 2^x from integer operations and is off by a few percent. A
/// 4-bit P hides that: neighbouring codes lie 33 % apart, so nearly every code is the one that exact
/// rounding gives. An affine classifier of the score, as Direct-P has, gives the right code much less
/// often. Schraudolph's exponential (C.2), for an 8-bit P, is right on average.
///
/// The polynomial is exact enough for either, but only behind a clamp of its argument: over a range of
/// 400 nats, which trained models reach, its exponent wraps, and nothing is left of the output
/// (section 4.3).
#[derive(Clone, Debug, clap::Args)]
pub struct Exponent {
    /// Length of the Gaussian document whose scores are classified
    #[arg(long, default_value_t = 1024)]
    pub length: usize,

    /// Seed of what is drawn
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Range of the scores, in nats, over which the unclamped polynomial is tried
    #[arg(long, default_value_t = 400.0)]
    pub nats: f32,

    /// Draw the relative errors into FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// One number about one exponential.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `mitchell-p`, `affine`, `schraudolph`, `polynomial 2` to `polynomial 5`, or
    /// `polynomial 3, unclamped`.
    pub name: &'static str,
    /// What it was given: for codes `uniform`, every score from -6 to log2(6) alike, or `attention`,
    /// the scores of Gaussian Q and K; otherwise a range of x.
    pub inputs: String,
    /// What was measured.
    pub metric: &'static str,
    /// The measurement; null if it is not a number.
    pub value: f64,
    /// What the paper states. It does not say on which inputs.
    pub paper: Option<f64>,
}

impl Exponent {
    /// Every measurement; the plot too, if asked for.
    ///
    /// # Errors
    /// A range that is no positive number, or a plot that cannot be written.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        if !(self.nats > 0.0 && self.nats.is_finite()) {
            return Err(ProbeError::Setting {
                setting: "nats",
                found: self.nats.to_string(),
                expected: "a range of scores is a positive number".into(),
            });
        }
        let progress = Progress::new(3);
        progress.at("codes");
        let mut rows = Vec::new();
        for (inputs, scores) in [
            ("uniform", Scores::uniform()),
            ("attention", Scores::gaussian(self.length, self.seed)?),
        ] {
            let agreement = |name, agreement, paper| Row {
                name,
                inputs: inputs.into(),
                metric: "code agreement",
                value: agreement,
                paper: Some(paper),
            };
            let affine = |z| Affine::TWO_PER_OCTAVE.code(z);
            rows.push(agreement(
                "mitchell-p",
                scores.agreement(mitchell_code),
                0.987,
            ));
            rows.push(agreement("affine", scores.agreement(affine), 0.633));
        }
        progress.step();
        progress.at("errors");
        for curve in &EXPONENTIALS {
            rows.extend(errors(curve));
        }
        progress.step();
        progress.at("attention");
        rows.extend(attended::rows(self.nats, self.seed)?);
        progress.step();
        if let Some(path) = &self.svg {
            svg(path)?;
        }
        Ok(rows)
    }
}
