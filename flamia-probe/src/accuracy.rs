//! `probe accuracy`: how close each path is to exact attention.

use flamia_kernels::{Mask, Options};
use serde::Serialize;

use crate::attention::{attend, exact};
use crate::error::ProbeError;
use crate::input::Inputs;
use crate::metric::{cosine, relative_error};
use crate::numerics::Numerics;
use crate::problem::{Outputs, Problem};
use crate::progress::Progress;

/// Cosine and relative error of O, dQ, dK and dV against float64
///
/// Every path is run forward and backward on the same BF16 operands as exact attention in float64
/// (paper, section 4.2 and table 4). Cosines of 0.998 and above are usual for mxfp8, 0.99 for nvfp4,
/// 0.98 (O) and 0.95 (dQ) for fp4.
///
/// A high cosine proves neither causal safety nor stable training: look at `leakage`, `flush` and
/// `consistency` too. With `--input outliers`, compare `--hadamard on` and `off`: the rotation helps
/// a coarse scale and hurts a fine one (appendix A.2).
#[derive(Clone, Debug, clap::Args)]
pub struct Accuracy {
    /// Numerics under test.
    #[command(flatten)]
    pub numerics: Numerics,

    /// Operands.
    #[command(flatten)]
    pub inputs: Inputs,

    /// Masks: causal, full, window:KEYS
    #[arg(
        long = "mask",
        value_name = "MASKS",
        value_delimiter = ',',
        default_value = "causal,full"
    )]
    pub masks: Vec<Mask>,

    /// Lengths of the one document that is drawn
    #[arg(long, value_delimiter = ',', default_value = "4096")]
    pub length: Vec<usize>,

    /// Query heads that are drawn
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub heads: usize,

    /// Key/value heads that are drawn [default: as many as query heads]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,

    /// Features of a head: 64, 96, 128, 256
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_dim: usize,
}

/// One path on one input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `gaussian`, `outliers`, or a layer of a capture.
    pub input: String,
    /// Precision path.
    pub path: String,
    /// How scales enter the products.
    pub profile: String,
    /// `causal`, `full` or `window:KEYS`.
    pub mask: String,
    /// Rows of the packed row.
    pub length: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// The defect switched on, if any.
    pub ablate: Option<String>,
    /// Cosine of O.
    pub o: f64,
    /// Cosine of dQ; null, like all of the gradients, under an exponential for inference.
    pub dq: f64,
    /// Cosine of dK.
    pub dk: f64,
    /// Cosine of dV.
    pub dv: f64,
    /// Relative Frobenius error of O.
    pub o_rel: f64,
    /// Relative Frobenius error of dQ.
    pub dq_rel: f64,
    /// Relative Frobenius error of dK.
    pub dk_rel: f64,
    /// Relative Frobenius error of dV.
    pub dv_rel: f64,
}

impl Row {
    /// How `found`, computed with `options`, differs from `expected`.
    pub fn new(
        input: &str,
        problem: &Problem,
        options: &Options,
        found: &Outputs,
        expected: &Outputs,
    ) -> Self {
        Self {
            input: input.to_owned(),
            path: options.path.to_string(),
            profile: options.profile.on_host().to_string(),
            mask: options.mask.to_string(),
            length: problem.rows(),
            heads: problem.heads,
            kv_heads: problem.kv_heads,
            head_dim: problem.head_dim,
            ablate: options.ablate.map(|ablation| ablation.to_string()),
            o: cosine(&found.o, &expected.o),
            dq: cosine(&found.dq, &expected.dq),
            dk: cosine(&found.dk, &expected.dk),
            dv: cosine(&found.dv, &expected.dv),
            o_rel: relative_error(&found.o, &expected.o),
            dq_rel: relative_error(&found.dq, &expected.dq),
            dk_rel: relative_error(&found.dk, &expected.dk),
            dv_rel: relative_error(&found.dv, &expected.dv),
        }
    }
}

impl Accuracy {
    /// A row for each input, length, mask and path.
    ///
    /// # Errors
    /// Inputs that cannot be read, numerics that do not go together.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        let shape = [
            self.heads,
            self.kv_heads.unwrap_or(self.heads),
            self.head_dim,
        ];
        let packed: Vec<_> = self.length.iter().map(|&length| vec![length]).collect();
        let problems = self.inputs.problems(&packed, shape)?;
        let mut cases = Vec::new();
        for (input, problem) in &problems {
            for &mask in &self.masks {
                let numerics = self.numerics.all(mask, problem.head_dim)?;
                cases.push((input, problem, mask, numerics));
            }
        }
        let progress = Progress::new(cases.iter().map(|case| case.3.len()).sum());
        let mut rows = Vec::new();
        for (input, problem, mask, numerics) in cases {
            progress.at(format_args!("float64 {mask} {input}"));
            let expected = exact(problem, mask)?;
            for options in numerics {
                progress.at(format_args!("{} {mask} {input}", options.path));
                let found = attend(problem, &options)?;
                rows.push(Row::new(input, problem, &options, &found, &expected));
                progress.step();
            }
        }
        Ok(rows)
    }
}
