//! The scaling schemes of the paper's table 5.

use flamia_format::{Element, ExponentRule, Ue8m0, round_columns, round_group};
use flamia_kernels::{Ablation, Mask, Options, Path, Profile};

use crate::attention::attend;
use crate::dense;
use crate::error::ProbeError;
use crate::problem::{Outputs, Problem, Tensor};

/// Tokens or features that share a scale of the microscaling formats.
const GROUP: usize = 32;

/// An attention with a name.
pub struct Scheme {
    /// What `--scheme` calls it.
    pub name: &'static str,
    attend: Attend,
}

type Attend = Box<dyn FnMut(&Problem) -> Result<Outputs, ProbeError>>;

impl Scheme {
    /// An attention of whatever kind.
    pub fn new(
        name: &'static str,
        attend: impl FnMut(&Problem) -> Result<Outputs, ProbeError> + 'static,
    ) -> Self {
        Self {
            name,
            attend: Box::new(attend),
        }
    }

    fn flamia(name: &'static str, options: Options) -> Self {
        Self::new(name, move |problem| Ok(attend(problem, &options)?))
    }

    /// MXFP8 with 32 elements per scale, put around exact attention. `tokens` are the operands that
    /// are grouped along tokens where a product contracts those; the others stay grouped along
    /// features.
    fn around_exact(
        name: &'static str,
        tokens: &'static [Tensor],
        rule: ExponentRule,
        mask: Mask,
    ) -> Self {
        Self::new(name, move |problem| {
            let features = along_features(problem, rule);
            let mut both = features.clone();
            for &tensor in tokens {
                both.tensor_mut(tensor)
                    .copy_from_slice(&along_tokens(problem, tensor, rule));
            }
            Ok(dense::attention(&features, &both, mask))
        })
    }

    /// Forward and backward pass.
    ///
    /// # Errors
    /// Those of the attention.
    pub fn attend(&mut self, problem: &Problem) -> Result<Outputs, ProbeError> {
        (self.attend)(problem)
    }
}

/// Every scheme that needs no torch, under `mask`.
pub fn schemes(mask: Mask) -> Vec<Scheme> {
    let options = |path| Options::new(path, mask);
    let ablated = |path, ablation| Options {
        ablate: Some(ablation),
        ..options(path)
    };
    let hopper = Options {
        profile: Profile::Hopper,
        ..options(Path::Mxfp8)
    };
    let no_folds = Options {
        v_fold: false,
        k_fold: false,
        ..options(Path::Fp4)
    };
    const V: &[Tensor] = &[Tensor::V];
    const ALL: &[Tensor] = &Tensor::ALL;
    use ExponentRule::{Floor, Up};
    vec![
        Scheme::flamia("reference", options(Path::Reference)),
        Scheme::flamia("mxfp8", options(Path::Mxfp8)),
        Scheme::flamia("mxfp8-hopper", hopper),
        Scheme::flamia("nvfp4", options(Path::Nvfp4)),
        Scheme::flamia("fp4", options(Path::Fp4)),
        Scheme::flamia("mxfp8-exact", options(Path::Mxfp8).exact()),
        Scheme::flamia("nvfp4-exact", options(Path::Nvfp4).exact()),
        Scheme::flamia("fp4-exact", options(Path::Fp4).exact()),
        Scheme::flamia(
            "mxfp8-per-tensor",
            ablated(Path::Mxfp8, Ablation::PerTensor),
        ),
        Scheme::flamia(
            "mxfp8-floor",
            ablated(Path::Mxfp8, Ablation::FloorExponents),
        ),
        Scheme::flamia(
            "nvfp4-floor",
            ablated(Path::Nvfp4, Ablation::FloorExponents),
        ),
        Scheme::flamia("fp4-floor", ablated(Path::Fp4, Ablation::FloorExponents)),
        Scheme::flamia("fp4-grouped-v", ablated(Path::Fp4, Ablation::GroupedV)),
        Scheme::flamia("fp4-no-folds", no_folds),
        Scheme::around_exact("1x32-v-along-keys", V, Up, mask),
        Scheme::around_exact("1x32-v-along-keys-floor", V, Floor, mask),
        Scheme::around_exact("1x32-both", ALL, Up, mask),
        Scheme::around_exact("1x32-both-floor", ALL, Floor, mask),
    ]
}

fn along_features(problem: &Problem, rule: ExponentRule) -> Problem {
    let mut rounded = problem.clone();
    for tensor in Tensor::ALL {
        let head_dim = rounded.head_dim;
        for row in rounded.tensor_mut(tensor).chunks_mut(head_dim) {
            for group in row.chunks_mut(GROUP) {
                round_group(group, Element::E4M3, rule);
            }
        }
    }
    rounded
}

/// Groups are counted from the start of each document.
fn along_tokens(problem: &Problem, tensor: Tensor, rule: ExponentRule) -> Vec<f32> {
    let token = problem.heads_of(tensor) * problem.head_dim;
    let mut values = problem.tensor(tensor).to_vec();
    let mut exponents = vec![Ue8m0::from_exponent(0); token];
    for document in problem.documents.iter() {
        let document = &mut values[document.start * token..document.end * token];
        for group in document.chunks_mut(GROUP * token) {
            let rows = group.len() / token;
            round_columns(
                group,
                rows,
                token,
                token,
                Element::E4M3,
                rule,
                &mut exponents,
            );
        }
    }
    values
}
