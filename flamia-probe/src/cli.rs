//! What can be probed.

use clap::{Parser, Subcommand};
use flamia_probe::accuracy::Accuracy;
use flamia_probe::documents::LoudDocument;
use flamia_probe::error::ProbeError;
use flamia_probe::exponent::Exponent;
use flamia_probe::flush::Flush;
use flamia_probe::leakage::{Leakage, Scheme, summary};
use flamia_probe::report::Output;

/// See what low-bit attention does: its accuracy, its leaks, its lost gradients
///
/// Every probe prints a table and, with --json FILE, writes the same rows as a JSON list.
#[derive(Parser)]
#[command(name = "cargo xtask probe", bin_name = "cargo xtask probe", version)]
pub struct Cli {
    #[command(subcommand)]
    probe: Probe,
}

#[derive(Subcommand)]
enum Probe {
    Accuracy(Flags<Accuracy>),
    Leakage(Flags<Leakage>),
    Flush(Flags<Flush>),
    Documents(Flags<LoudDocument>),
    Exponent(Flags<Exponent>),
    #[cfg(feature = "torch")]
    Capture(Flags<flamia_probe::torch::capture::Capture>),
    #[cfg(feature = "torch")]
    Consistency(Flags<flamia_probe::torch::consistency::Consistency>),
    /// Write a checkpoint's activations, for the other probes to read (needs torch)
    #[cfg(not(feature = "torch"))]
    #[command(disable_help_flag = true)]
    Capture(needs_torch::Anything),
    /// Train with the forward and backward passes at odds (needs torch)
    #[cfg(not(feature = "torch"))]
    #[command(disable_help_flag = true)]
    Consistency(needs_torch::Anything),
}

// No documentation of its own: the last one below becomes the subcommand's.
#[derive(clap::Args)]
struct Flags<P: clap::Args> {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    probe: P,
}

/// Runs the probe that was asked for.
pub fn run(cli: Cli) -> Result<(), ProbeError> {
    match cli.probe {
        Probe::Accuracy(Flags { probe, output }) => {
            if let Some(warning) = probe.numerics.warning() {
                eprintln!("warning: {warning}");
            }
            let rows = probe.rows()?;
            Ok(output.show(
                "cosine and relative error to exact attention in float64",
                &rows,
            )?)
        }
        Probe::Leakage(Flags { probe, output }) => {
            let rows = probe.rows(more_schemes())?;
            let caption = "what results know of a token that they must not depend on";
            Ok(output.show_summary(caption, &summary(&rows), &rows)?)
        }
        Probe::Flush(Flags { probe, output }) => {
            let rows = probe.rows()?;
            Ok(output.show("share of nonzero entries rounded to zero", &rows)?)
        }
        Probe::Documents(Flags { probe, output }) => {
            let rows = probe.rows()?;
            let caption = format!("one document scaled by {} among others", probe.factor);
            Ok(output.show(&caption, &rows)?)
        }
        Probe::Exponent(Flags { probe, output }) => {
            let rows = probe.rows()?;
            Ok(output.show("approximations of 2^x", &rows)?)
        }
        #[cfg(feature = "torch")]
        Probe::Capture(Flags { probe, output }) => {
            let rows = probe.rows()?;
            Ok(output.show("what was captured, with the largest magnitudes", &rows)?)
        }
        #[cfg(feature = "torch")]
        Probe::Consistency(Flags { probe, output }) => {
            let rows = probe.rows()?;
            Ok(output.show(&probe.caption(), &rows)?)
        }
        #[cfg(not(feature = "torch"))]
        Probe::Capture(_) => Err(ProbeError::NeedsTorch { probe: "capture" }),
        #[cfg(not(feature = "torch"))]
        Probe::Consistency(_) => Err(ProbeError::NeedsTorch {
            probe: "consistency",
        }),
    }
}

fn more_schemes() -> Vec<Scheme> {
    #[allow(unused_mut, reason = "without features there are none")]
    let mut schemes = Vec::new();
    #[cfg(feature = "cuda")]
    schemes.extend(flamia_probe::gpu::schemes(flamia_kernels::Mask::Causal));
    #[cfg(feature = "torch")]
    schemes.extend(flamia_probe::torch::schemes());
    schemes
}

#[cfg(not(feature = "torch"))]
mod needs_torch {
    use std::ffi::OsString;

    /// Whatever is typed after a probe that is not there.
    #[derive(clap::Args)]
    pub struct Anything {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        _args: Vec<OsString>,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }
}
