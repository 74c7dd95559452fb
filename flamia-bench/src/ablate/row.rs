//! What was measured, and how it compares with the call as it is.

use std::fmt;

use flamia_kernels::BackwardForm;
use serde::Serialize;

use super::Without;
use crate::attention::row::{self, Masking, Setting};
use crate::attention::workload::Shape;

/// What is timed, quantisation included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// Output and log-sum-exp
    Fwd,
    /// Both passes, in one call
    Train,
}

impl From<Pass> for row::Pass {
    fn from(pass: Pass) -> Self {
        match pass {
            Pass::Fwd => row::Pass::Fwd,
            Pass::Train => row::Pass::Train,
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        row::Pass::from(*self).fmt(f)
    }
}

/// One time, before it is compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    #[allow(missing_docs)]
    pub shape: Shape,
    #[allow(missing_docs)]
    pub pass: Pass,
    /// What was left out; nothing of the call as it is.
    pub without: Option<Without>,
    /// Of the backward pass, if there is one.
    pub form: Option<BackwardForm>,
    /// Milliseconds.
    pub ms: f64,
    /// Whether a CUDA graph was replayed.
    pub graph: bool,
    /// Rounds of which this is the median.
    pub rounds: u32,
}

/// One line of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Name of the packed row or batch.
    pub workload: &'static str,
    /// `causal`.
    pub mask: Masking,
    /// `fwd` or `train`, with quantisation.
    pub pass: Pass,
    /// What was left out, as `--without` has it; null for the call as it is.
    pub without: Option<String>,
    /// What took its place.
    pub instead: Option<&'static str>,
    /// `two-kernel` or `one-kernel`, of the backward pass that ran.
    pub backward: Option<String>,
    /// Milliseconds.
    pub ms: f64,
    /// These as a multiple of those of the call as it is: above 1 where it pays.
    pub ratio: f64,
    /// 10^12 operations a second, causal ones counted once.
    pub tflops: f64,
    /// Whether a CUDA graph was replayed.
    pub graph: bool,
    /// Rounds of which this is the median.
    pub rounds: u32,
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that its driver supports.
    pub driver: String,
    /// torch's version.
    pub torch: String,
    /// The commit that was built.
    pub commit: Option<String>,
}

/// Every timing beside the call as it is, of the same workload and pass; without that one there are none.
pub fn compared(timings: &[Timing], setting: &Setting) -> Vec<Row> {
    let row = |timing: &Timing| {
        let as_it_is = timings.iter().find(|other| {
            other.without.is_none() && (other.shape, other.pass) == (timing.shape, timing.pass)
        })?;
        let flops = timing.shape.flops(Masking::Causal, timing.pass.into());
        Some(Row {
            workload: timing.shape.name,
            mask: Masking::Causal,
            pass: timing.pass,
            without: timing.without.map(|without| without.to_string()),
            instead: timing.without.map(Without::instead),
            backward: timing.form.map(|form| form.to_string()),
            ms: timing.ms,
            ratio: timing.ms / as_it_is.ms,
            tflops: flops / timing.ms / 1e9,
            graph: timing.graph,
            rounds: timing.rounds,
            gpu: setting.gpu.clone(),
            driver: setting.driver.clone(),
            torch: setting.torch.clone(),
            commit: setting.commit.clone(),
        })
    };
    timings.iter().filter_map(row).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::attention::row::tests::setting;
    use crate::attention::way::Way;

    pub fn timing(workload: &str, pass: Pass, without: Option<Without>, ms: f64) -> Timing {
        let shape = Shape::named(workload).unwrap();
        let way = without.map_or(Way::default(), Without::way);
        Timing {
            shape,
            form: (pass == Pass::Train).then(|| way.form(&shape, Masking::Causal).form),
            pass,
            without,
            ms,
            graph: true,
            rounds: 15,
        }
    }

    /// Of two workloads.
    pub fn timings() -> Vec<Timing> {
        let (fwd, train) = (Pass::Fwd, Pass::Train);
        let longest = Some(Without::LongestFirst);
        vec![
            timing("4x4096", fwd, None, 0.5),
            timing("4x4096", fwd, longest, 0.75),
            timing("4x4096", train, None, 2.0),
            timing("4x4096", train, Some(Without::OneKernel), 2.25),
            timing("16x1024", fwd, None, 0.25),
            timing("16x1024", fwd, longest, 0.1875),
        ]
    }

    #[test]
    fn ratios_are_over_the_call_as_it_is() {
        let rows = compared(&timings(), &setting());
        let ratios: Vec<_> = rows.iter().map(|row| row.ratio).collect();
        assert_eq!(ratios, [1.0, 1.5, 1.0, 1.125, 1.0, 0.75]);
        // 4 * 16 * 128 * 4 * 4096^2 / 2 operations in half a millisecond.
        assert!((rows[0].tflops - 549.755_813_888).abs() < 1e-6);
        let alone = [timing("4x4096", Pass::Fwd, Some(Without::Overlap), 1.0)];
        assert!(compared(&alone, &setting()).is_empty());
    }

    #[test]
    fn rows_are_flat_and_have_the_documented_keys() {
        let row = serde_json::to_value(&compared(&timings(), &setting())[3]).unwrap();
        let found: Vec<_> = row
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone()))
            .collect();
        let flops = Shape::named("4x4096")
            .unwrap()
            .flops(Masking::Causal, row::Pass::Train);
        let expected = [
            ("workload", "4x4096".into()),
            ("mask", "causal".into()),
            ("pass", "train".into()),
            ("without", "one-kernel".into()),
            ("instead", "two backward kernels".into()),
            ("backward", "two-kernel".into()),
            ("ms", 2.25.into()),
            ("ratio", 1.125.into()),
            ("tflops", (flops / 2.25 / 1e9).into()),
            ("graph", true.into()),
            ("rounds", 15.into()),
            ("gpu", "NVIDIA H200".into()),
            ("driver", "13.0".into()),
            ("torch", "2.11.0".into()),
            ("commit", "0123abcd".into()),
        ];
        assert_eq!(found, expected);
    }
}
