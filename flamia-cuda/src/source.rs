//! Kernel sources as the crates that own them embed them, and what is compiled from one.

use sha2::{Digest, Sha256};

use crate::arch::Arch;
use crate::version::Version;

/// A `.cu` file, embedded.
///
/// ```
/// use flamia_cuda::{Header, Source};
///
/// const PTX: Header = Header { name: "ptx.cuh", text: "/* include_str!(\"ptx.cuh\") */" };
/// pub const SORT: Source = Source {
///     name: "flamia-sched/kernels/sort.cu",
///     text: "/* include_str!(\"../kernels/sort.cu\") */",
///     headers: &[PTX],
/// };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file's path in messages, from the workspace's root. In the cubin's line table, for
    /// profilers, NVRTC puts the folder before it where the compiling process ran.
    pub name: &'static str,
    /// The file's text.
    pub text: &'static str,
    /// Every header that it includes, directly or not. No other file is looked at, not even CUDA's
    /// own headers.
    pub headers: &'static [Header],
}

/// A `.cuh` file, embedded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// As the `#include` directives spell it.
    pub name: &'static str,
    /// The file's text.
    pub text: &'static str,
}

/// The [`Header`] in the file of this name beside the file that calls.
#[macro_export]
macro_rules! header {
    ($name:literal) => {
        $crate::Header {
            name: $name,
            text: include_str!($name),
        }
    };
}

/// What one cubin is compiled from.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The file that holds the kernels, which are `extern "C"`.
    pub source: &'a Source,
    /// Macros with their values, in order. The value may be empty.
    pub defines: &'a [(&'a str, String)],
    /// The architecture that the code is for.
    pub arch: Arch,
}

impl Program<'_> {
    /// The compiler's options, all of them.
    pub(crate) fn options(&self) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={}", self.arch),
            // Resources and spills, into the log.
            "--ptxas-options=-v".to_owned(),
            // NVRTC keeps cubins of its own, beside a driver, and has no log for those: a kernel is known by its log.
            "--no-cache".to_owned(),
        ];
        options.extend(self.options_of_the_language());
        options
    }

    /// The options that give the PTX which [`Program::options`] has assembled.
    pub(crate) fn options_for_ptx(&self) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", self.arch.virtual_name())];
        options.extend(self.options_of_the_language());
        options
    }

    fn options_of_the_language(&self) -> impl Iterator<Item = String> {
        let fixed = ["--std=c++17", "--generate-line-info"].map(str::to_owned);
        let define = |(name, value): &(&str, String)| format!("--define-macro={name}={value}");
        fixed.into_iter().chain(self.defines.iter().map(define))
    }

    /// Names the cubin by everything that it depends on.
    pub(crate) fn key(&self, nvrtc: Version) -> Key {
        // Changes with what a cache entry holds.
        const FORMAT: &str = "flamia-cuda cubin 1";
        let mut hash = Sha256::new();
        // With its length before it, no part can run into the next.
        let mut part = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        part(FORMAT);
        part(&nvrtc.to_string());
        part(self.source.name);
        part(self.source.text);
        part(&self.source.headers.len().to_string());
        for header in self.source.headers {
            part(header.name);
            part(header.text);
        }
        for option in self.options() {
            part(&option);
        }
        Key(hash.finalize().into())
    }
}

/// The SHA-256 of all that a cubin depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(pub [u8; 32]);

impl Key {
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADERS: [Header; 2] = [
        Header {
            name: "a.cuh",
            text: "a",
        },
        Header {
            name: "b.cuh",
            text: "b",
        },
    ];
    const SOURCE: Source = Source {
        name: "k.cu",
        text: "k",
        headers: &HEADERS,
    };
    const V13_0: Version = Version {
        major: 13,
        minor: 0,
    };

    fn key(source: &Source, defines: &[(&str, &str)], arch: Arch, nvrtc: Version) -> String {
        let defines: Vec<_> = defines
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect();
        Program {
            source,
            defines: &defines,
            arch,
        }
        .key(nvrtc)
        .hex()
    }

    #[test]
    fn everything_is_in_the_key_and_nothing_else() {
        const SWAPPED: [Header; 2] = [
            Header {
                name: "a.cuh",
                text: "b",
            },
            Header {
                name: "b.cuh",
                text: "a",
            },
        ];
        const SHIFTED: [Header; 2] = [
            Header {
                name: "a.cuh",
                text: "ab",
            },
            Header {
                name: ".cuh",
                text: "b",
            },
        ];
        let base = || key(&SOURCE, &[("N", "4")], Arch::Sm90a, V13_0);
        assert_eq!(base(), base());
        let sources = [
            Source {
                name: "l.cu",
                ..SOURCE
            },
            Source {
                text: "l",
                ..SOURCE
            },
            Source {
                headers: &SWAPPED,
                ..SOURCE
            },
            Source {
                headers: &SHIFTED,
                ..SOURCE
            },
            Source {
                headers: &[],
                ..SOURCE
            },
        ];
        let mut keys: Vec<_> = sources
            .iter()
            .map(|source| key(source, &[("N", "4")], Arch::Sm90a, V13_0))
            .collect();
        keys.extend([
            base(),
            key(&SOURCE, &[], Arch::Sm90a, V13_0),
            key(&SOURCE, &[("N", "5")], Arch::Sm90a, V13_0),
            key(&SOURCE, &[("M", "4")], Arch::Sm90a, V13_0),
            key(&SOURCE, &[("N", "4")], Arch::Sm100a, V13_0),
            key(
                &SOURCE,
                &[("N", "4")],
                Arch::Sm90a,
                Version {
                    major: 13,
                    minor: 1,
                },
            ),
        ]);
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }
}
