//! `bench ablate`: what each optimisation of attention on the GPU buys.

pub mod row;
pub mod table;
mod without;

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use flamia_probe::report::Output;

pub use self::row::Pass;
pub use self::without::Without;
#[cfg(feature = "torch")]
use crate::attention::gpu;
use crate::attention::workload::{Shape, shapes};
use crate::attention::{BenchError, writable};

/// What each optimisation of attention on the GPU buys
///
/// As the paper's section 4.3: our causal call, quantisation included, with one optimisation left out at a
/// time, beside the call as it is. `ratio` is the time without it as a multiple of the time with it: 1.10x
/// means that leaving it out costs 10 %, and under 1.00x that the call would be faster without. What two of
/// them buy together is not the sum.
///
/// Timed as `bench attention` times: every call in a CUDA graph, taking turns in the other order every second
/// round, each replayed once without the clock and once with it; medians. Before the clock starts, the
/// results of every way are compared with those of the call as it is, which `bench attention --check`
/// compares with the CPU's.
///
/// The call as it is has the form of the backward pass that the rule picks. What a call does not have is not
/// left out: `one-kernel` and `fp16-sums` are in the rows that the rule picks one kernel for, `overlap` and
/// `two-kernels` in the others.
///
/// `train` is one call with both passes. The schedule, made once a micro-batch for all layers, is not in the
/// time.
#[derive(Clone, Debug, clap::Args)]
pub struct Ablate {
    /// Draw what each buys into FILE
    #[arg(long, value_name = "FILE", display_order = 1001)]
    pub svg: Option<PathBuf>,

    /// Packed rows and batches [default: the nine packed rows]
    #[arg(
        long, value_name = "NAME", value_delimiter = ',', num_args = 1..,
        value_parser = PossibleValuesParser::new(shapes().map(|shape| shape.name))
    )]
    pub workload: Vec<String>,

    /// Passes to measure
    #[arg(long, value_delimiter = ',', default_value = "fwd,train")]
    pub pass: Vec<Pass>,

    /// What to leave out, one at a time
    #[arg(
        long, value_delimiter = ',', num_args = 1..,
        default_values_t = Without::ALL, hide_default_value = true
    )]
    pub without: Vec<Without>,

    /// Rounds of which the median is reported
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Which GPU, counted from 0
    #[arg(long, default_value_t = 0)]
    pub gpu: usize,
}

impl Ablate {
    /// Measures, and shows it.
    ///
    /// # Errors
    /// There is no GPU or no torch, a result is wrong, or a file cannot be written.
    pub fn run(&self, output: &Output) -> Result<(), BenchError> {
        // A mistake in these should not cost a measurement.
        writable(output.json.iter().chain(&self.svg))?;
        self.measure(output)
    }

    /// The workloads that were asked for, in the order of the table.
    pub fn shapes(&self) -> Vec<Shape> {
        let is_wanted = |shape: &Shape| match self.workload.is_empty() {
            true => Shape::is_packed_row(shape.name),
            false => self.workload.iter().any(|name| name == shape.name),
        };
        shapes().filter(is_wanted).collect()
    }

    #[cfg(not(feature = "torch"))]
    fn measure(&self, _: &Output) -> Result<(), BenchError> {
        Err(BenchError::NoTorch)
    }

    #[cfg(feature = "torch")]
    fn measure(&self, output: &Output) -> Result<(), BenchError> {
        let (timings, setting) = gpu::ablate::run(self)?;
        let rows = row::compared(&timings, &setting);
        self.show(&rows, output)
    }

    /// Tables, JSON and drawing of what was measured.
    #[cfg(any(feature = "torch", test))]
    fn show(&self, rows: &[row::Row], output: &Output) -> Result<(), BenchError> {
        use std::io::Write;

        output.show_summary(
            "our causal attention with one optimisation left out",
            &table::lines(rows),
            rows,
        )?;
        Output::default().show("what each buys", &table::means(rows))?;
        let _ = writeln!(std::io::stdout().lock(), "{}", table::NOTES);
        if let Some(path) = &self.svg {
            table::costs(rows).draw(path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::ablate::row::tests::timings;
    use crate::attention::row::tests::setting;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: Ablate,
    }

    fn parsed(line: &[&str]) -> Result<Ablate, clap::Error> {
        Line::try_parse_from([&["bench"], line].concat()).map(|line| line.bench)
    }

    #[test]
    fn the_packed_rows_and_everything_are_the_default() {
        let all = parsed(&[]).unwrap();
        assert_eq!(all.shapes().len(), 9);
        assert_eq!(all.pass, [Pass::Fwd, Pass::Train]);
        assert_eq!(all.without, Without::ALL);
        let some = parsed(&["--workload", "1x32768", "--without", "early-starts"]).unwrap();
        assert_eq!(some.shapes()[0].name, "1x32768");
        assert_eq!(some.without, [Without::EarlyStarts]);
        let error = parsed(&["--without", "early-strats"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("early-starts"), "{error}");
        assert!(parsed(&["--pass", "bwd"]).is_err());
    }

    #[test]
    fn what_was_measured_goes_into_both_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let output = Output {
            json: Some(file("rows.json")),
        };
        let mut bench = parsed(&[]).unwrap();
        bench.svg = Some(file("bars.svg"));
        let rows = row::compared(&timings(), &setting());
        bench.show(&rows, &output).unwrap();
        let text = std::fs::read_to_string(file("rows.json")).unwrap();
        let json: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(json.len(), rows.len());
        assert!(
            std::fs::read_to_string(file("bars.svg"))
                .unwrap()
                .contains("longest-first")
        );
    }
}
