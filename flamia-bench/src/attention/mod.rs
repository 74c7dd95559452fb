//! `bench attention`: attention on the GPU, beside every other attention that runs there.

pub mod chart;
mod error;
pub mod external;
#[cfg(feature = "torch")]
pub(crate) mod gpu;
pub mod memory;
mod profile;
pub mod rounds;
pub mod row;
pub mod sample;
pub mod table;
pub mod way;
pub mod workload;

use std::io::Write;
use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::PossibleValuesParser;
use flamia_probe::report::Output;

pub use self::error::BenchError;
use self::external::{PeersError, PeersFile};
#[cfg(feature = "torch")]
pub use self::gpu::GpuBenchError;
use self::row::{Masking, Pass};
use self::workload::{Shape, shapes};

/// Attention on the GPU beside every other attention there, forward, backward and both
///
/// The nine packed rows of the paper's section 4.1 and batches as in its appendix J, causal and full.
/// With libtorch come FlashAttention 2 on packed documents and cuDNN; what other programs measured of
/// other systems on the same machine joins the table with --peers. K and V are repeated for peers
/// where query heads share them, before the clock starts.
///
/// Every call is captured in a CUDA graph where it can be. Systems take turns, in the other order
/// every second round, each replayed once without the clock and once with it, so that the L2 cache
/// holds what the call itself left there; the median of all rounds is reported. `quantisation` is
/// `in` where a low-bit call starts from BF16, `out` where its operands were quantised before. The
/// schedule, made once a micro-batch for all layers, is not in the time. TFLOP/s count causal
/// operations once: 4 * heads * head_dim * sum(length^2) / 2 forward, 2.5 times that backward. Which form
/// of the backward pass the rule picked for our calls is in the table, and why is below it.
///
/// With --memory nothing is timed: it shows what one causal training call of 131,072 rows (32 documents of
/// 4,096, 16 heads of 128) holds between its passes and occupies at most, beside the BF16 peers'. Ours is shown
/// as the rule has it, which is one backward kernel there, and with two, which take less for themselves.
///
/// Before the clock starts, outputs are compared: ours with the CPU's on a part of the row, the
/// peers' with ours. A wrong result is not timed.
#[derive(Clone, Debug, clap::Args)]
pub struct Attention {
    /// Draw the rates into FILE
    #[arg(long, value_name = "FILE", display_order = 1001)]
    pub svg: Option<PathBuf>,

    /// Times that attention_peers.py wrote on this machine just before, as causal:FILE, or full:FILE
    /// if it ran with CAUSAL=0
    #[arg(long, value_name = "MASK:FILE", num_args = 1..)]
    pub peers: Vec<PeersFile>,

    /// Packed rows and batches [default: all]
    #[arg(
        long, value_name = "NAME", value_delimiter = ',', num_args = 1..,
        value_parser = PossibleValuesParser::new(shapes().map(|shape| shape.name))
    )]
    pub workload: Vec<String>,

    /// Masks to measure
    #[arg(long, value_delimiter = ',', default_value = "causal,full")]
    pub mask: Vec<Masking>,

    /// Passes to measure
    #[arg(long, value_delimiter = ',', default_value = "fwd,bwd,train")]
    pub pass: Vec<Pass>,

    /// Systems to measure
    #[arg(long, value_delimiter = ',', default_value = "flamia,fa2,cudnn")]
    pub system: Vec<Entrant>,

    /// Compare outputs, and time nothing
    #[arg(long)]
    pub check: bool,

    /// Show what a training call of 131,072 rows occupies, and time nothing
    #[arg(long, conflicts_with_all = ["check", "peers", "workload", "mask", "pass", "svg"])]
    pub memory: bool,

    /// Rounds of which the median is reported
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Print the command line that profiles the launches of KERNEL, a regular expression such as
    /// `attention_forward` or `quantise`, and run nothing
    #[arg(long, value_name = "KERNEL")]
    pub profile: Option<String>,

    /// Which GPU, counted from 0
    #[arg(long, default_value_t = 0)]
    pub gpu: usize,
}

/// A system that this program runs itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Entrant {
    /// This project's MXFP8 kernels
    Flamia,
    /// torch's FlashAttention 2 on packed documents, BF16
    Fa2,
    /// torch's cuDNN attention, BF16, on documents of one length
    Cudnn,
    /// torch's cuDNN attention, BF16, on packed documents. Not by default: with torch 2.11.0 on an
    /// H200 its gradients were wrong, and one ended the process with an illegal memory access
    CudnnPacked,
}

impl Attention {
    /// Does what was asked for, and shows it.
    ///
    /// # Errors
    /// There is no GPU or no torch, a result is wrong, times of others cannot be used, or a file
    /// cannot be written.
    pub fn run(&self, output: &Output) -> Result<(), BenchError> {
        if let Some(kernel) = &self.profile {
            let _ = writeln!(
                std::io::stdout().lock(),
                "{}",
                profile::command(kernel, self)
            );
            return Ok(());
        }
        // A mistake in these should not cost a measurement.
        let external = self.external()?;
        writable(output.json.iter().chain(&self.svg))?;
        if self.memory {
            return self.occupied(output);
        }
        self.measure(external, output)
    }

    /// The workloads that were asked for, in the order of the table.
    fn shapes(&self) -> Vec<Shape> {
        let is_wanted = |shape: &Shape| {
            self.workload.is_empty() || self.workload.iter().any(|name| name == shape.name)
        };
        shapes().filter(is_wanted).collect()
    }

    /// The times of other programs that go with what was asked for.
    fn external(&self) -> Result<Vec<row::Measurement>, PeersError> {
        let mut times = Vec::new();
        for file in &self.peers {
            times.extend(file.read()?);
        }
        let shapes = self.shapes();
        times.retain(|time| {
            shapes.contains(&time.shape)
                && self.mask.contains(&time.mask)
                && self.pass.contains(&time.pass)
        });
        Ok(times)
    }

    #[cfg(not(feature = "torch"))]
    fn occupied(&self, _: &Output) -> Result<(), BenchError> {
        Err(BenchError::NoTorch)
    }

    #[cfg(feature = "torch")]
    fn occupied(&self, output: &Output) -> Result<(), BenchError> {
        let (measured, setting) = gpu::memory::run(self)?;
        let rows = memory::rows(&measured, &setting);
        let caption = format!(
            "memory of a causal training call of 131,072 rows, {}",
            setting.gpu
        );
        output.show_summary(&caption, &memory::lines(&rows), &rows)?;
        Ok(())
    }

    #[cfg(not(feature = "torch"))]
    fn measure(&self, _: Vec<row::Measurement>, _: &Output) -> Result<(), BenchError> {
        Err(BenchError::NoTorch)
    }

    #[cfg(feature = "torch")]
    fn measure(&self, external: Vec<row::Measurement>, output: &Output) -> Result<(), BenchError> {
        let found = gpu::run(self)?;
        if self.check {
            output.show("outputs of attention on the GPU", &found.checks)?;
            return Ok(());
        }
        let measurements = [found.measurements, external].concat();
        let rows = row::compared(&measurements, &found.setting);
        output.show_summary("attention on the GPU", &table::lines(&rows), &rows)?;
        if let Some(told) = table::form(&rows) {
            let _ = writeln!(std::io::stdout().lock(), "{told}");
        }
        let plain = Output::default();
        plain.show(
            "geometric means of our speed-ups",
            &table::means(&rows, gpu::OURS),
        )?;
        plain.show("memory beyond operands and results", &table::memory(&rows))?;
        if let Some(path) = &self.svg {
            chart::rates(&rows).draw(path)?;
        }
        Ok(())
    }
}

/// Refuses files in folders that are not there, before anything is measured.
pub(crate) fn writable<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Result<(), BenchError> {
    for path in files {
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(BenchError::NoFolder {
                path: path.clone(),
                folder: folder.to_owned(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: Attention,
    }

    fn parsed(line: &[&str]) -> Result<Attention, clap::Error> {
        Line::try_parse_from([&["bench"], line].concat()).map(|line| line.bench)
    }

    #[test]
    fn all_is_measured_unless_something_is_named() {
        let all = parsed(&[]).unwrap();
        assert_eq!(all.shapes().len(), shapes().count());
        assert_eq!(all.mask, [Masking::Causal, Masking::Full]);
        assert_eq!(all.pass, [Pass::Fwd, Pass::Bwd, Pass::Train]);
        assert_eq!(all.system, [Entrant::Flamia, Entrant::Fa2, Entrant::Cudnn]);
        let some = parsed(&["--workload", "1x16384,4x4096", "16x1024", "--mask", "full"]).unwrap();
        let names: Vec<_> = some.shapes().iter().map(|shape| shape.name).collect();
        assert_eq!(names, ["4x4096", "16x1024", "1x16384"]);
        assert_eq!(some.mask, [Masking::Full]);
    }

    #[test]
    fn misspelt_values_are_understood() {
        for (line, meant) in [
            (["--workload", "4x4069"], "4x4096"),
            (["--mask", "causl"], "causal"),
            (["--system", "cudn"], "cudnn"),
            (["--pass", "trian"], "train"),
        ] {
            let error = parsed(&line).unwrap_err().to_string();
            assert!(
                error.contains("similar value") && error.contains(meant),
                "{error}"
            );
        }
        let error = parsed(&["--peers", "peers.json"]).unwrap_err().to_string();
        assert!(error.contains("causal:peers.json"), "{error}");
        assert!(parsed(&["--rounds", "0"]).is_err());
        assert!(parsed(&["--memory", "--system", "flamia,fa2"]).is_ok());
        assert!(parsed(&["--memory", "--mask", "full"]).is_err());
    }

    #[test]
    fn a_profile_is_of_one_call() {
        let line = [
            "--profile",
            "attention_forward",
            "--mask",
            "full",
            "--gpu",
            "1",
        ];
        let settings = parsed(&line).unwrap();
        let command = profile::command("attention_forward", &settings);
        assert_eq!(
            command,
            "ncu --clock-control none --target-processes all --set full -k \
             'regex:attention_forward' -s 2 -c 1 cargo xtask bench --workload 4x4096 --mask full \
             --pass fwd --system flamia --rounds 1 --gpu 1"
        );
        // What follows the profiler is a command line of this program.
        let (_, line) = command.split_once("cargo xtask bench ").unwrap();
        let again = parsed(&line.split(' ').collect::<Vec<_>>()).unwrap();
        assert_eq!((again.shapes().len(), again.system.len()), (1, 1));
    }

    #[test]
    fn times_of_others_are_those_that_were_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("peers.json");
        let entry = |workload| {
            format!(r#"{{"workload": "{workload}", "peer": "FA3", "fwd_ms": 1.0, "bwd_ms": 2.0}}"#)
        };
        let text = format!("[{}, {}]", entry("4x4096"), entry("16x1024"));
        std::fs::write(&path, text).unwrap();
        let peers = format!("causal:{}", path.display());
        let line = ["--peers", &peers, "--workload", "16x1024", "--pass", "fwd"];
        let times = parsed(&line).unwrap().external().unwrap();
        assert_eq!(times.len(), 1);
        assert_eq!((times[0].shape.name, times[0].ms), ("16x1024", 1.0));
        let other_mask = [&line[..], &["--mask", "full"]].concat();
        assert!(parsed(&other_mask).unwrap().external().unwrap().is_empty());
    }
}
