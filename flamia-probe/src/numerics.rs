//! The numerics under test, as flags.

use flamia_kernels::{
    Ablation, AttentionError, DqAccumulator, Exponential, Hadamard, Mask, Options, Path, Profile,
};

/// Which paths, and what differs from their defaults.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Numerics {
    /// Precision paths: reference, mxfp8, nvfp4, fp4 [default: all that the other flags fit]
    #[arg(long = "path", value_name = "PATHS", value_delimiter = ',')]
    pub paths: Vec<Path>,

    /// Turn all exact options on: per-token scales, dS exponents per row, the causal dQ scale
    #[arg(long)]
    pub exact: bool,

    /// A defect to study: tiling, unquantised-d, output-d, p4-forward, exp-forward,
    /// floor-exponents, per-tensor, grouped-v, unclamped-polynomial, saturate
    #[arg(long, value_name = "DEFECT")]
    pub ablate: Option<Ablation>,

    /// How 2^x is evaluated: exact, polynomial, mitchell-p (fp4), schraudolph (mxfp8, nvfp4)
    #[arg(long, value_name = "NAME")]
    pub exponential: Option<Exponential>,

    /// Rotation of Q and K: auto, on, off
    #[arg(long, value_name = "WHEN")]
    pub hadamard: Option<Hadamard>,

    /// Partial sums of dQ: fp16, fp16-causal, fp32
    #[arg(long, value_name = "KIND")]
    pub dq: Option<DqAccumulator>,

    /// How scales enter the products of mxfp8: block-scaled, hopper
    #[arg(long, value_name = "NAME")]
    pub profile: Option<Profile>,

    /// Probabilities are multiplied by 2^C before they are rounded to E4M3
    #[arg(long, value_name = "C", allow_negative_numbers = true)]
    pub c: Option<i32>,

    /// The running maximum is replaced when a tile exceeds it by more than TAU powers of two
    #[arg(long, value_name = "TAU", allow_negative_numbers = true)]
    pub tau: Option<f32>,
}

impl Numerics {
    /// The options of `path` under these flags.
    pub fn options(&self, path: Path, mask: Mask) -> Options {
        let mut options = Options::new(path, mask);
        if self.exact && path.is_low_bit() {
            options = options.exact();
        }
        options.ablate = self.ablate;
        options.exponential = self.exponential.unwrap_or(options.exponential);
        options.hadamard = self.hadamard.unwrap_or(options.hadamard);
        options.dq = self.dq.unwrap_or(options.dq);
        options.profile = self.profile.unwrap_or(options.profile);
        options.c = self.c.unwrap_or(options.c);
        options.tau = self.tau.unwrap_or(options.tau);
        options
    }

    /// The options of every path asked for; of all that the other flags go with, if none is named.
    ///
    /// # Errors
    /// A named path does not go with the other flags, or no path does.
    pub fn all(&self, mask: Mask, head_dim: usize) -> Result<Vec<Options>, AttentionError> {
        let valid = |path: &Path| {
            let options = self.options(*path, mask);
            options.validate(head_dim).map(|()| options)
        };
        if !self.paths.is_empty() {
            return self.paths.iter().map(valid).collect();
        }
        let (fit, unfit): (Vec<_>, Vec<_>) = Path::ALL.iter().map(valid).partition(Result::is_ok);
        match unfit.into_iter().next_back() {
            Some(refusal) if fit.is_empty() => Err(refusal.unwrap_err()),
            _ => fit.into_iter().collect(),
        }
    }

    /// What to tell whoever asked for a defect.
    pub fn warning(&self) -> Option<String> {
        self.ablate.map(Ablation::warning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unnamed_paths_are_those_that_fit() {
        let paths = |numerics: Numerics| -> Vec<Path> {
            let all = numerics.all(Mask::Causal, 128).unwrap();
            all.iter().map(|options| options.path).collect()
        };
        assert_eq!(paths(Numerics::default()), Path::ALL);
        assert_eq!(
            paths(Numerics {
                ablate: Some(Ablation::GroupedV),
                ..Numerics::default()
            }),
            [Path::Fp4]
        );
    }

    #[test]
    fn what_fits_nowhere_is_refused_with_the_reason() {
        let misfit = Numerics {
            ablate: Some(Ablation::GroupedV),
            exponential: Some(Exponential::Schraudolph),
            ..Numerics::default()
        };
        assert!(misfit.all(Mask::Causal, 128).is_err());
        let named = Numerics {
            paths: vec![Path::Mxfp8],
            ablate: Some(Ablation::GroupedV),
            ..Numerics::default()
        };
        let error = named.all(Mask::Causal, 128).unwrap_err().to_string();
        assert!(
            error.contains("grouped-v") && error.contains("mxfp8"),
            "{error}"
        );
    }
}
