//! What the attention under test is given.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::capture;
use crate::error::ProbeError;
use crate::problem::{Problem, Tensor};

/// Where operands come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Standard normal.
    Gaussian,
    /// Standard normal, but a few channels of K are larger (paper, appendix A.2).
    Outliers,
    /// Every layer of a file that `probe capture` wrote.
    Capture(PathBuf),
}

impl FromStr for Input {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match (name, name.strip_prefix("capture:")) {
            ("gaussian", _) => Ok(Self::Gaussian),
            ("outliers", _) => Ok(Self::Outliers),
            (_, Some(file)) if !file.is_empty() => Ok(Self::Capture(file.into())),
            _ => Err("use `gaussian`, `outliers` or `capture:FILE`".into()),
        }
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gaussian => f.pad("gaussian"),
            Self::Outliers => f.pad("outliers"),
            Self::Capture(file) => write!(f, "capture:{}", file.display()),
        }
    }
}

/// Operands to draw or to read.
#[derive(Clone, Debug, clap::Args)]
pub struct Inputs {
    /// What is attended to: gaussian, outliers, capture:FILE
    #[arg(
        long = "input",
        value_name = "INPUTS",
        value_delimiter = ',',
        default_value = "gaussian"
    )]
    pub inputs: Vec<Input>,

    /// Seed of what is drawn
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Channels of K that `outliers` makes larger, spread evenly over the head
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub outlier_channels: usize,

    /// How much larger
    #[arg(long, value_name = "FACTOR", default_value_t = 16.0)]
    pub outlier_factor: f32,
}

impl Inputs {
    /// One named problem per packed row that is drawn and per layer of a capture. `packed` holds the
    /// document lengths of each row to draw, `shape` its heads, key/value heads and head dimension; a
    /// capture brings its own.
    ///
    /// # Errors
    /// More outlier channels than there are, heads that cannot be shared, a capture that cannot be
    /// read.
    pub fn problems(
        &self,
        packed: &[Vec<usize>],
        shape: [usize; 3],
    ) -> Result<Vec<(String, Problem)>, ProbeError> {
        let mut problems = Vec::new();
        for input in &self.inputs {
            let name = input.to_string();
            let draw = match input {
                Input::Gaussian => Self::gaussian,
                Input::Outliers => Self::outliers,
                Input::Capture(file) => {
                    for (layer, problem) in capture::read(file)?.into_iter().enumerate() {
                        problems.push((format!("capture layer {layer}"), problem));
                    }
                    continue;
                }
            };
            for lengths in packed {
                problems.push((name.clone(), draw(self, lengths, shape)?));
            }
        }
        Ok(problems)
    }

    fn gaussian(&self, lengths: &[usize], shape: [usize; 3]) -> Result<Problem, ProbeError> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        Ok(Problem::gaussian(lengths, shape, &mut rng)?)
    }

    fn outliers(&self, lengths: &[usize], shape: [usize; 3]) -> Result<Problem, ProbeError> {
        let head_dim = shape[2];
        if !(1..=head_dim).contains(&self.outlier_channels) {
            return Err(ProbeError::Setting {
                setting: "outlier-channels",
                found: self.outlier_channels.to_string(),
                expected: format!("a head has 1 to {head_dim} channels to choose"),
            });
        }
        let mut problem = self.gaussian(lengths, shape)?;
        let every = head_dim / self.outlier_channels;
        let chosen = |feature| feature % every == 0 && feature / every < self.outlier_channels;
        problem.scale(Tensor::K, |_, _, feature| {
            if chosen(feature) {
                self.outlier_factor
            } else {
                1.0
            }
        });
        Ok(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for name in ["gaussian", "outliers", "capture:a/b.safetensors"] {
            assert_eq!(name.parse::<Input>().unwrap().to_string(), name);
        }
        for name in ["normal", "capture:", ""] {
            assert!(name.parse::<Input>().unwrap_err().contains("capture:FILE"));
        }
    }

    #[test]
    fn outliers_are_as_many_channels_as_asked_and_no_more() {
        let inputs = Inputs {
            inputs: vec![Input::Gaussian, Input::Outliers],
            seed: 1,
            outlier_channels: 3,
            outlier_factor: 16.0,
        };
        let problems = inputs.problems(&[vec![40]], [2, 1, 64]).unwrap();
        let [(_, plain), (_, loud)] = problems.as_slice() else {
            panic!("two inputs");
        };
        assert_eq!((&plain.q, &plain.v), (&loud.q, &loud.v));
        let changed: Vec<usize> = (0..64)
            .filter(|feature| plain.k[*feature] != loud.k[*feature])
            .collect();
        assert_eq!(changed, [0, 21, 42]);
        assert_eq!(loud.k[21], 16.0 * plain.k[21]);

        let too_many = Inputs {
            outlier_channels: 65,
            ..inputs
        };
        assert!(too_many.problems(&[vec![40]], [2, 1, 64]).is_err());
    }
}
