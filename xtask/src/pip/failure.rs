//! Why pip failed, read from what it printed.

use std::io;
use std::path::{Path, PathBuf};

/// The causes that have a remedy of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    NoNetwork,
    NoMatch,
    NoSpace,
    Other,
}

#[derive(Debug, thiserror::Error)]
pub enum PipError {
    #[error(
        "pip could not install {requirements}: {}\n  pip said: {said}\n  To mend it: {}\n  pip's whole output is in {}",
        .cause.named(), .cause.remedy(.python), .log.display()
    )]
    Failed {
        requirements: String,
        cause: Cause,
        said: String,
        python: PathBuf,
        log: PathBuf,
    },
    #[error("cannot run pip with {}: {source}", .python.display())]
    Run { python: PathBuf, source: io::Error },
    #[error("cannot write pip's log {}: {source}", .log.display())]
    Log { log: PathBuf, source: io::Error },
}

impl PipError {
    pub(super) fn failed(requirements: &[String], output: &str, log: &Path, python: &Path) -> Self {
        let cause = Cause::diagnose(output);
        let mut lines = output.lines().map(str::trim);
        let said = lines
            .clone()
            .rfind(|line| cause.phrases().iter().any(|phrase| line.contains(phrase)))
            .or_else(|| lines.rfind(|line| !line.is_empty()));
        let said = said.unwrap_or("nothing");
        // The retry settings before this are of no interest.
        let (_, said) = said.split_once("broken by ").unwrap_or(("", said));
        Self::Failed {
            requirements: requirements.join(" "),
            cause,
            said: said.to_owned(),
            python: python.to_owned(),
            log: log.to_owned(),
        }
    }

    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::Failed { cause, .. } => Some(*cause),
            Self::Run { .. } | Self::Log { .. } => None,
        }
    }
}

const SPACE: &[&str] = &["No space left on device", "Errno 28", "Disk quota exceeded"];
const NETWORK: &[&str] = &[
    "Failed to establish a new connection",
    "NewConnectionError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "nodename nor servname provided",
    "Network is unreachable",
    "Connection refused",
    "Connection reset",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Read timed out",
    "Cannot connect to proxy",
    "ProxyError",
    "SSLError",
    "Max retries exceeded",
    "Connection broken",
    "IncompleteRead",
];
const MATCH: &[&str] = &[
    "No matching distribution found",
    "Could not find a version that satisfies",
];

impl Cause {
    fn diagnose(output: &str) -> Self {
        let has = |phrases: &[&str]| phrases.iter().any(|phrase| output.contains(phrase));
        if has(SPACE) {
            return Self::NoSpace;
        }
        // Without a network pip ends with "no matching distribution (from versions: none)" too.
        // Where it lists versions it did reach an index, whatever it had to retry before.
        let reached_index =
            output.contains("(from versions: ") && !output.contains("(from versions: none)");
        if has(MATCH) && (reached_index || !has(NETWORK)) {
            return Self::NoMatch;
        }
        if has(NETWORK) {
            return Self::NoNetwork;
        }
        Self::Other
    }

    /// The line that tells of the cause holds one of these.
    fn phrases(self) -> &'static [&'static str] {
        match self {
            Self::NoNetwork => NETWORK,
            Self::NoMatch => MATCH,
            Self::NoSpace => SPACE,
            Self::Other => &["ERROR: "],
        }
    }

    fn named(self) -> &'static str {
        match self {
            Self::NoNetwork => "the package index cannot be reached",
            Self::NoMatch => "there is no such wheel for this Python and system",
            Self::NoSpace => "the disk is full",
            Self::Other => "it failed",
        }
    }

    fn remedy(self, python: &Path) -> String {
        match self {
            Self::NoNetwork => "connect to the network, or tell pip of your proxy or mirror \
                (PIP_PROXY, PIP_CERT, PIP_INDEX_URL, or pip.conf), and run the same command \
                again; what pip has downloaded is kept"
                .to_owned(),
            Self::NoMatch => format!(
                "use a Python from 3.10 to 3.14 on Linux (x86-64, ARM64) or macOS (ARM64); the \
                 one used was {}. Activate an environment with such a Python, or set LIBTORCH to \
                 an unpacked libtorch {}",
                python.display(),
                crate::libtorch::WANTED
            ),
            Self::NoSpace => "free some space on the disks of target/, of the temporary folder \
                (TMPDIR) and of pip's cache (PIP_CACHE_DIR), or point these elsewhere, and run the \
                same command again"
                .to_owned(),
            Self::Other => {
                "run the same command again; if it fails again, the log says more".to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFLINE: &str = "\
WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after connection broken by 'NewConnectionError('<HTTPSConnection object>: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.11.0 (from versions: none)
ERROR: No matching distribution found for torch==2.11.0
";
    const WRONG_PYTHON: &str = "\
ERROR: Ignored the following versions that require a different python version: 2.9.0 Requires-Python >=3.10
ERROR: Could not find a version that satisfies the requirement torch==2.11.0 (from versions: 2.5.0, 2.8.0)
ERROR: No matching distribution found for torch==2.11.0
";
    const FULL: &str = "\
  Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)
ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device
";

    #[test]
    fn logs_are_mapped_to_causes() {
        let retried = format!(
            "WARNING: Retrying after connection broken by 'ReadTimeoutError'\n{WRONG_PYTHON}"
        );
        let cases = [
            (OFFLINE, Cause::NoNetwork),
            (WRONG_PYTHON, Cause::NoMatch),
            (retried.as_str(), Cause::NoMatch),
            (
                "ERROR: No matching distribution found for torch==2.11.0",
                Cause::NoMatch,
            ),
            (FULL, Cause::NoSpace),
            (
                "ERROR: HTTPSConnectionPool: Read timed out.",
                Cause::NoNetwork,
            ),
            ("Segmentation fault", Cause::Other),
            ("", Cause::Other),
        ];
        for (log, cause) in cases {
            assert_eq!(Cause::diagnose(log), cause, "{log}");
        }
    }

    #[test]
    fn the_message_names_what_where_and_the_remedy() {
        let requirements = ["torch==2.11.0".to_owned()];
        let shown = |log| {
            PipError::failed(
                &requirements,
                log,
                Path::new("target/pip.log"),
                Path::new("/env/python"),
            )
            .to_string()
        };
        let offline = shown(OFFLINE);
        for part in [
            "torch==2.11.0",
            "cannot be reached",
            "PIP_PROXY",
            "target/pip.log",
        ] {
            assert!(offline.contains(part), "{part}: {offline}");
        }
        assert!(!offline.contains("redirect=None"), "{offline}");
        let wrong = shown(WRONG_PYTHON);
        for part in ["no such wheel", "/env/python", "LIBTORCH"] {
            assert!(wrong.contains(part), "{part}: {wrong}");
        }
        assert!(shown(FULL).contains("TMPDIR"));
    }
}
