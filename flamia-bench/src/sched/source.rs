//! Where document lengths come from.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{fmt, iter};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use flamia_sched::workloads::{WORKLOADS, Workload};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::SchedError;

/// Tokens drawn if not said otherwise.
const TOTAL: usize = 65536;

/// Documents to schedule.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Source {
    /// Workloads of the paper's section 4.1 [default: all nine]
    #[arg(
        long = "workload",
        value_name = "NAMES",
        value_delimiter = ',',
        value_parser = workload(),
        group = "source"
    )]
    pub workloads: Vec<&'static Workload>,

    /// A file of document lengths, separated by blanks or lines, comments behind a #
    #[arg(long, value_name = "FILE", group = "source")]
    pub lengths: Option<PathBuf>,

    /// Lengths to draw: log-uniform:MIN:MAX, equal:LEN, fixed:8192,32x256
    #[arg(long, value_name = "KIND", group = "source")]
    pub distribution: Option<Distribution>,

    /// Tokens to draw; the last document is cut to fit [default: 65536, `fixed` its list once]
    #[arg(long, value_name = "TOKENS", requires = "distribution")]
    pub total: Option<usize>,

    /// Seed of what is drawn
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

fn workload() -> impl TypedValueParser<Value = &'static Workload> {
    let names = WORKLOADS.map(|workload| workload.name);
    PossibleValuesParser::new(names)
        .map(|name| Workload::named(&name).expect("only names of workloads are possible"))
}

/// The documents of one packed row, or of a whole data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// A workload, a file or a distribution.
    pub name: String,
    /// Tokens of each document.
    pub lengths: Vec<usize>,
    /// Query and key/value heads of a workload.
    pub heads: Option<[usize; 2]>,
}

impl Source {
    /// What was asked for: several workloads, one file, or one draw.
    ///
    /// # Errors
    /// A file that cannot be read or holds something else.
    pub fn read(&self) -> Result<Vec<Lengths>, SchedError> {
        if let Some(path) = &self.lengths {
            return Ok(vec![Lengths {
                name: path.display().to_string(),
                lengths: read(path)?,
                heads: None,
            }]);
        }
        if let Some(distribution) = &self.distribution {
            return Ok(vec![Lengths {
                name: distribution.to_string(),
                lengths: distribution.draw(self.total, self.seed),
                heads: None,
            }]);
        }
        let chosen = match self.workloads.as_slice() {
            [] => WORKLOADS.iter().collect(),
            some => some.to_vec(),
        };
        let of_workload = |workload: &Workload| Lengths {
            name: workload.name.into(),
            lengths: workload.lengths.to_vec(),
            heads: Some([workload.heads, workload.kv_heads]),
        };
        Ok(chosen.into_iter().map(of_workload).collect())
    }
}

fn read(path: &Path) -> Result<Vec<usize>, SchedError> {
    let text = std::fs::read_to_string(path).map_err(|source| SchedError::Read {
        path: path.into(),
        source,
    })?;
    let mut lengths = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let numbers = text.split('#').next().unwrap_or_default();
        for word in numbers.split_whitespace() {
            lengths.push(word.parse().map_err(|_| SchedError::Length {
                path: path.into(),
                line,
                found: word.into(),
            })?);
        }
    }
    if lengths.is_empty() {
        return Err(SchedError::NoLengths { path: path.into() });
    }
    Ok(lengths)
}

/// How document lengths are distributed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// The logarithm of the length is uniform from that of the first to that of the second.
    LogUniform(usize, usize),
    /// All of one length.
    Equal(usize),
    /// So many documents of such a length, and on, from the start again where more are asked for.
    Fixed(Vec<(usize, usize)>),
}

impl Distribution {
    /// Document lengths for `total` tokens, the last one cut to fit. The same seed draws the same.
    pub fn draw(&self, total: Option<usize>, seed: u64) -> Vec<usize> {
        let tokens = total.unwrap_or(TOTAL);
        match self {
            Self::LogUniform(min, max) => {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                let (low, high) = ((*min as f64).ln(), (*max as f64).ln());
                let lengths = iter::repeat_with(|| {
                    let length = (low + (high - low) * rng.random::<f64>()).exp();
                    (length.round() as usize).clamp(*min, *max)
                });
                fill(tokens, lengths)
            }
            Self::Equal(length) => fill(tokens, iter::repeat(*length)),
            Self::Fixed(runs) => {
                let list = runs
                    .iter()
                    .flat_map(|&(count, length)| iter::repeat_n(length, count));
                match total {
                    Some(total) => fill(total, list.cycle()),
                    None => list.collect(),
                }
            }
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LogUniform(min, max) => write!(f, "log-uniform:{min}:{max}"),
            Self::Equal(length) => write!(f, "equal:{length}"),
            Self::Fixed(runs) => {
                let runs = runs.iter().map(|(count, length)| match count {
                    1 => length.to_string(),
                    _ => format!("{count}x{length}"),
                });
                write!(f, "fixed:{}", runs.collect::<Vec<_>>().join(","))
            }
        }
    }
}

/// Lengths up to `total`.
fn fill(total: usize, lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut left = total;
    lengths
        .map_while(|length| {
            let fits = length.min(left);
            left -= fits;
            (fits > 0).then_some(fits)
        })
        .collect()
}

impl FromStr for Distribution {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or(
            "use `log-uniform:MIN:MAX`, `equal:LEN` or `fixed:8192,32x256`, with lengths of at least \
             1 and MIN at most MAX",
        )
    }
}

fn parse(text: &str) -> Option<Distribution> {
    let positive = |text: &str| text.parse().ok().filter(|&length| length > 0usize);
    let (kind, rest) = text.split_once(':')?;
    match kind {
        "log-uniform" => {
            let (min, max) = rest.split_once(':')?;
            let (min, max) = (positive(min)?, positive(max)?);
            (min <= max).then_some(Distribution::LogUniform(min, max))
        }
        "equal" => positive(rest).map(Distribution::Equal),
        "fixed" => {
            let run = |run: &str| match run.split_once('x') {
                Some((count, length)) => Some((positive(count)?, positive(length)?)),
                None => Some((1, positive(run)?)),
            };
            let runs: Option<_> = rest.split(',').map(run).collect();
            runs.map(Distribution::Fixed)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(distribution: &str, total: Option<usize>, seed: u64) -> Vec<usize> {
        let distribution: Distribution = distribution.parse().unwrap();
        distribution.draw(total, seed)
    }

    #[test]
    fn distributions_are_read_and_written_alike() {
        for text in ["log-uniform:128:8192", "equal:1024", "fixed:8192,32x256"] {
            let distribution: Distribution = text.parse().unwrap();
            assert_eq!(distribution.to_string(), text);
        }
        for text in [
            "",
            "equal",
            "equal:0",
            "log-uniform:9",
            "log-uniform:9:8",
            "fixed:",
            "fixed:0x8",
            "fixed:8x",
            "normal:8",
        ] {
            let error = text.parse::<Distribution>().unwrap_err();
            assert!(error.contains("log-uniform:MIN:MAX"), "{text}: {error}");
        }
    }

    #[test]
    fn draws_have_the_asked_for_total() {
        assert_eq!(drawn("fixed:8,3x2", None, 0), [8, 2, 2, 2]);
        assert_eq!(drawn("fixed:8,3x2", Some(19), 0), [8, 2, 2, 2, 5]);
        assert_eq!(drawn("equal:30000", None, 0), [30000, 30000, 5536]);
        let log_uniform = drawn("log-uniform:128:8192", Some(1 << 22), 3);
        assert_eq!(log_uniform.iter().sum::<usize>(), 1 << 22);
        let (_, whole) = log_uniform.split_last().unwrap();
        assert!(whole.iter().all(|length| (128..=8192).contains(length)));
        // Half the logarithms are below the middle one, that of 1024.
        let short = whole.iter().filter(|&&length| length < 1024).count() as f64;
        assert!((short / whole.len() as f64 - 0.5).abs() < 0.04);
        assert_eq!(drawn("log-uniform:128:8192", Some(1 << 22), 3), log_uniform);
        assert_ne!(drawn("log-uniform:128:8192", Some(1 << 22), 4), log_uniform);
    }

    fn lengths_in(text: &str) -> Result<Vec<usize>, SchedError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lengths.txt");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn files_may_hold_blank_lines_and_comments() {
        let text = "# tokens\n\n12 7\t0\r\n  9 # the last one\n";
        assert_eq!(lengths_in(text).unwrap(), [12, 7, 0, 9]);
    }

    #[test]
    fn a_bad_file_is_named_with_its_line() {
        for (text, wanted) in [
            ("1\n\n2 x7\n", "lengths.txt:3: `x7` is no document length"),
            ("-5", "lengths.txt:1: `-5`"),
            ("1.5", "lengths.txt:1: `1.5`"),
            ("# only words\n", "lengths.txt holds no document length"),
        ] {
            let error = lengths_in(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let missing = read(Path::new("/no/lengths.txt")).unwrap_err().to_string();
        assert!(missing.contains("/no/lengths.txt"), "{missing}");
    }
}
