//! Times that another program took of other systems on this machine, for the same table.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use serde::Deserialize;

use super::row::{Masking, Measurement, Pass, Precision, Quantisation, System};
use super::workload::Shape;

/// A file of times, and the mask that they were taken with, which the file does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeersFile {
    mask: Masking,
    path: PathBuf,
}

/// Times that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PeersError {
    /// A file without its mask.
    #[error(
        "`{found}` does not say which mask the times were taken with: write causal:{found}, or \
         full:{found} if the program ran with CAUSAL=0"
    )]
    NoMask {
        /// What was given.
        found: String,
    },
    /// A file that cannot be read.
    #[error("cannot read the peers' times in {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file that is no list of times.
    #[error(
        "{} is no list of the peers' times, each with workload, peer, fwd_ms and bwd_ms: {source}",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column.
        source: serde_json::Error,
    },
    /// A workload that nothing here is measured on.
    #[error(
        "{}, entry {entry}: there is no workload `{found}`; did you mean `{nearest}`?",
        path.display()
    )]
    Workload {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        entry: usize,
        /// The name.
        found: String,
        /// The most similar one.
        nearest: &'static str,
    },
    /// A time that is none.
    #[error("{}, entry {entry}: {key} is {found}, and has to be a positive number", path.display())]
    Time {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        entry: usize,
        /// `fwd_ms` or `bwd_ms`.
        key: &'static str,
        /// The value.
        found: f64,
    },
    /// A rate that the time would not have under this mask.
    #[error(
        "{}, entry {entry}: {found:.0} TFLOP/s in {ms} ms are not {mask} attention on {workload}, \
         which would be {expected:.0}: is it a file of the other mask?", path.display()
    )]
    Mask {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        entry: usize,
        /// The mask that was claimed.
        mask: Masking,
        /// The workload's name.
        workload: &'static str,
        /// Milliseconds.
        ms: f64,
        /// The rate beside them.
        found: f64,
        /// What it would have been.
        expected: f64,
    },
}

/// One system on one workload, as `attention_peers.py` writes it.
#[derive(Deserialize)]
struct Entry {
    workload: String,
    peer: String,
    /// Null where there is no such pass; the key is there.
    #[serde(deserialize_with = "Option::deserialize")]
    fwd_ms: Option<f64>,
    #[serde(deserialize_with = "Option::deserialize")]
    bwd_ms: Option<f64>,
    fwd_tf: Option<f64>,
    #[serde(default)]
    note: String,
}

impl FromStr for PeersFile {
    type Err = PeersError;

    fn from_str(text: &str) -> Result<Self, PeersError> {
        let parts = text.split_once(':').and_then(|(mask, path)| {
            let mask = Masking::from_str(mask, false).ok()?;
            let path = (!path.is_empty()).then(|| path.into())?;
            Some(Self { mask, path })
        });
        parts.ok_or_else(|| PeersError::NoMask {
            found: text.to_owned(),
        })
    }
}

impl PeersFile {
    /// The file's times, those of the training call as the sum of both passes.
    ///
    /// # Errors
    /// The file is not there or damaged, names a workload that there is not, or is of another mask.
    pub fn read(&self) -> Result<Vec<Measurement>, PeersError> {
        let path = &self.path;
        let text = fs::read_to_string(path).map_err(|source| PeersError::Read {
            path: path.clone(),
            source,
        })?;
        let entries: Vec<Entry> =
            serde_json::from_str(&text).map_err(|source| PeersError::Json {
                path: path.clone(),
                source,
            })?;
        let measurements = (1..)
            .zip(entries)
            .map(|(number, entry)| entry.measurements(self.mask, path, number));
        Ok(measurements.collect::<Result<Vec<_>, _>>()?.concat())
    }
}

impl Entry {
    fn measurements(
        self,
        mask: Masking,
        path: &Path,
        entry: usize,
    ) -> Result<Vec<Measurement>, PeersError> {
        let path = || path.to_owned();
        let shape = Shape::named(&self.workload).ok_or_else(|| PeersError::Workload {
            path: path(),
            entry,
            nearest: Shape::nearest(&self.workload),
            found: self.workload.clone(),
        })?;
        for (key, ms) in [("fwd_ms", self.fwd_ms), ("bwd_ms", self.bwd_ms)] {
            if let Some(found) = ms.filter(|ms| !(*ms > 0.0 && ms.is_finite())) {
                return Err(PeersError::Time {
                    path: path(),
                    entry,
                    key,
                    found,
                });
            }
        }
        if let (Some(ms), Some(found)) = (self.fwd_ms, self.fwd_tf) {
            let expected = shape.flops(mask, Pass::Fwd) / ms / 1e9;
            if (found / expected - 1.0).abs() > 0.1 {
                return Err(PeersError::Mask {
                    path: path(),
                    entry,
                    mask,
                    workload: shape.name,
                    ms,
                    found,
                    expected,
                });
            }
        }
        let both = self.fwd_ms.zip(self.bwd_ms).map(|(fwd, bwd)| fwd + bwd);
        let is_fp8 = self.peer.to_lowercase().contains("fp8");
        let system = System {
            name: self.peer,
            precision: if is_fp8 {
                Precision::Fp8
            } else {
                Precision::Bf16
            },
            is_ours: false,
        };
        let times = [
            (Pass::Fwd, self.fwd_ms),
            (Pass::Bwd, self.bwd_ms),
            (Pass::Train, both),
        ];
        let measurements = times.into_iter().filter_map(|(pass, ms)| {
            Some(Measurement {
                shape,
                mask,
                pass,
                system: system.clone(),
                // The script quantises before it starts the clock.
                quantisation: is_fp8.then_some(Quantisation::Out),
                ms: ms?,
                graph: None,
                rounds: None,
                memory: None,
                form: None,
                note: self.note.clone(),
            })
        });
        Ok(measurements.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the script wrote of two systems, with causal masks.
    const WRITTEN: &str = r#"[
{
"workload": "4x4096",
"peer": "FA4 cute sm90 bf16",
"fwd_ms": 0.5,
"bwd_ms": 1.25,
"fwd_tf": 549.755813888,
"bwd_tf": 549.755813888,
"note": ""
},
{
"workload": "logu11-16k",
"peer": "FA3 fp8 (fwd wheel)",
"fwd_ms": 0.25,
"bwd_ms": null,
"fwd_tf": null,
"bwd_tf": null,
"note": "kernels only"
}
]"#;

    fn read(text: &str, mask: &str) -> Result<Vec<Measurement>, PeersError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("peers.json");
        fs::write(&path, text).unwrap();
        let file: PeersFile = format!("{mask}:{}", path.display()).parse().unwrap();
        file.read()
    }

    fn refusal(text: &str) -> String {
        let error = read(text, "causal").unwrap_err().to_string();
        assert!(error.contains("peers.json"), "{error}");
        error
    }

    #[test]
    fn the_scripts_file_becomes_measurements() {
        let found = read(WRITTEN, "causal").unwrap();
        let told: Vec<_> = found
            .iter()
            .map(|m| {
                (
                    m.shape.name,
                    m.pass,
                    m.system.precision,
                    m.quantisation,
                    m.ms,
                )
            })
            .collect();
        let (bf16, fp8) = (Precision::Bf16, Precision::Fp8);
        assert_eq!(
            told,
            [
                ("4x4096", Pass::Fwd, bf16, None, 0.5),
                ("4x4096", Pass::Bwd, bf16, None, 1.25),
                ("4x4096", Pass::Train, bf16, None, 1.75),
                ("logu11-16k", Pass::Fwd, fp8, Some(Quantisation::Out), 0.25),
            ]
        );
        assert_eq!(found[3].note, "kernels only");
        assert_eq!(found[3].graph, None);
    }

    #[test]
    fn a_file_of_the_other_mask_is_noticed() {
        let error = read(WRITTEN, "full").unwrap_err().to_string();
        assert!(
            error.contains("entry 1") && error.contains("550 TFLOP/s") && error.contains("1100"),
            "{error}"
        );
    }

    #[test]
    fn damage_is_named_with_its_place() {
        let error = refusal(&WRITTEN.replace("\"fwd_ms\": 0.25,\n", ""));
        assert!(
            error.contains("`fwd_ms`") && error.contains("line 18"),
            "{error}"
        );
        let error = refusal(&WRITTEN[..WRITTEN.len() - 30]);
        assert!(error.contains("EOF") && error.contains("line"), "{error}");
        let error = refusal(&WRITTEN.replace("1.25", "NaN"));
        assert!(error.contains("line 6"), "{error}");
        let error = refusal(&WRITTEN.replace("0.25", "-0.25"));
        assert!(error.contains("entry 2: fwd_ms is -0.25"), "{error}");
        let error = refusal(&WRITTEN.replace("logu11-16k", "logu11-16"));
        assert!(error.contains("did you mean `logu11-16k`?"), "{error}");
        let error = PeersFile {
            mask: Masking::Full,
            path: "no/peers.json".into(),
        };
        let error = error.read().unwrap_err().to_string();
        assert!(error.contains("no/peers.json"), "{error}");
    }

    #[test]
    fn the_mask_is_asked_for() {
        for text in ["peers.json", "window:peers.json", "causal:"] {
            let error = text.parse::<PeersFile>().unwrap_err().to_string();
            assert!(error.contains(&format!("causal:{text}")), "{error}");
        }
    }
}
