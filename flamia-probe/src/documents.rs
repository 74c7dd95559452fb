//! `probe documents`: what a loud document does to its neighbours in the packed row.

use flamia_kernels::{Ablation, Mask, Options, Path};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::attention::{attend, exact};
use crate::error::ProbeError;
use crate::metric::cosine;
use crate::problem::{Outputs, Problem, Tensor};
use crate::progress::Progress;

/// Scale one document up, and see what its neighbours lose
///
/// Documents in a packed row are strangers. With scales that lie within a document the others' results
/// do not change by a bit when one document's activations grow by 10^4; with one scale for the whole
/// tensor their operands fall to the bottom of the format (paper, section 4.1: a dK cosine of 0.99805
/// against 0.99151).
#[derive(Clone, Debug, clap::Args)]
pub struct LoudDocument {
    /// Lengths of the documents
    #[arg(long, value_delimiter = ',', default_value = "512,512,512,512")]
    pub lengths: Vec<usize>,

    /// Which of them is scaled, counted from 0
    #[arg(long, value_name = "INDEX", default_value_t = 1)]
    pub loud: usize,

    /// By how much its Q, K, V and dO are multiplied
    #[arg(long, default_value_t = 1e4)]
    pub factor: f32,

    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub heads: usize,

    /// Features of a head: 64, 96, 128, 256
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub head_dim: usize,

    /// Seed of what is drawn
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// One result under one scheme.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// A precision path, `-per-tensor` where one scale covers the whole packed row.
    pub scheme: String,
    /// `o`, `dq`, `dk` or `dv`.
    pub tensor: &'static str,
    /// Cosine to exact attention over all rows of the other documents.
    pub cosine_others: f64,
    /// The same when no document is scaled.
    pub cosine_quiet: f64,
    /// Cosine over the rows of the scaled document.
    pub cosine_scaled: f64,
    /// Whether scaling the document left every bit of the others' results as it was.
    pub others_bitwise: bool,
}

impl LoudDocument {
    /// A row for each scheme and result.
    ///
    /// # Errors
    /// A loud document that is not there or has no neighbour, a head dimension that is not supported.
    pub fn rows(&self) -> Result<Vec<Row>, ProbeError> {
        if self.lengths.len() < 2 || self.loud >= self.lengths.len() {
            return Err(ProbeError::Setting {
                setting: "loud",
                found: self.loud.to_string(),
                expected: format!(
                    "one of several documents is scaled, 0 to {} here",
                    self.lengths.len().saturating_sub(1)
                ),
            });
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let shape = [self.heads, self.heads, self.head_dim];
        let quiet = Problem::gaussian(&self.lengths, shape, &mut rng)?;
        let start: usize = self.lengths[..self.loud].iter().sum();
        let scaled = start..start + self.lengths[self.loud];
        let mut loud = quiet.clone();
        for tensor in Tensor::ALL {
            loud.scale(tensor, |row, _, _| {
                if scaled.contains(&row) {
                    self.factor
                } else {
                    1.0
                }
            });
        }

        let schemes = schemes();
        let progress = Progress::new(schemes.len());
        let expected = [exact(&quiet, Mask::Causal)?, exact(&loud, Mask::Causal)?];
        let token = self.heads * self.head_dim;
        let scaled = scaled.start * token..scaled.end * token;
        let split = |x: &[f64]| {
            let others = [&x[..scaled.start], &x[scaled.end..]].concat();
            (others, x[scaled.clone()].to_vec())
        };
        let mut rows = Vec::new();
        for options in schemes {
            progress.at(options.path);
            let found = [attend(&quiet, &options)?, attend(&loud, &options)?];
            for (at, tensor) in ["o", "dq", "dk", "dv"].into_iter().enumerate() {
                let part = |outputs: &Outputs| {
                    split([&outputs.o, &outputs.dq, &outputs.dk, &outputs.dv][at])
                };
                let [(quiet_others, _), (others, own)] = found.each_ref().map(part);
                let [(exact_others, _), (_, exact_own)] = expected.each_ref().map(part);
                rows.push(Row {
                    scheme: match options.ablate {
                        None => options.path.to_string(),
                        Some(ablation) => format!("{}-{ablation}", options.path),
                    },
                    tensor,
                    cosine_others: cosine(&others, &exact_others),
                    cosine_quiet: cosine(&quiet_others, &exact_others),
                    cosine_scaled: cosine(&own, &exact_own),
                    others_bitwise: quiet_others == others,
                });
            }
            progress.step();
        }
        Ok(rows)
    }
}

/// Every low-bit path with its own scales and, where it has E4M3 operands, with one scale for the
/// packed row.
fn schemes() -> Vec<Options> {
    Path::ALL
        .into_iter()
        .filter(|path| path.is_low_bit())
        .flat_map(|path| {
            let local = Options::new(path, Mask::Causal);
            let per_tensor = Options {
                ablate: Some(Ablation::PerTensor),
                ..local
            };
            let ablated = Ablation::PerTensor.applies_to(path).then_some(per_tensor);
            [Some(local), ablated].into_iter().flatten()
        })
        .collect()
}
