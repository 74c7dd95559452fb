//! What a cubin is compiled for.

use std::fmt;
use std::str::FromStr;

/// A real architecture, as NVRTC names it: `sm_90a`.
///
/// The `a` variants have the instructions of exactly one chip (`wgmma` and `setmaxnreg` on Hopper,
/// `tcgen05` on Blackwell), and their cubins run on nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Arch {
    Sm75,
    Sm80,
    Sm86,
    Sm89,
    Sm90,
    Sm90a,
    Sm100,
    Sm100a,
    Sm103,
    Sm103a,
    Sm120,
    Sm120a,
}

impl Arch {
    /// Every architecture, oldest first.
    pub const ALL: [Self; 12] = [
        Self::Sm75,
        Self::Sm80,
        Self::Sm86,
        Self::Sm89,
        Self::Sm90,
        Self::Sm90a,
        Self::Sm100,
        Self::Sm100a,
        Self::Sm103,
        Self::Sm103a,
        Self::Sm120,
        Self::Sm120a,
    ];

    /// What to compile for on a GPU of this compute capability (major, minor): the `a` variant on
    /// the datacentre chips that have one, else the newest architecture whose cubins run there.
    /// None where there is none.
    pub fn of(compute_capability: (i32, i32)) -> Option<Self> {
        Some(match compute_capability {
            (7, 5) => Self::Sm75,
            (8, 0..=5) => Self::Sm80,
            (8, 6..=8) => Self::Sm86,
            (8, 9) => Self::Sm89,
            (9, 0) => Self::Sm90a,
            (10, 0) => Self::Sm100a,
            (10, 3) => Self::Sm103a,
            (12, _) => Self::Sm120,
            _ => return None,
        })
    }

    /// Whether a cubin for `self` runs on the GPU that [`Arch::of`] said `gpu` for: cubins run on
    /// later minor revisions of their chip, those of the `a` variants on their chip alone.
    pub fn runs_on(self, gpu: Self) -> bool {
        let (major, minor, only) = self.parts();
        let (gpu_major, gpu_minor, _) = gpu.parts();
        major == gpu_major && (minor == gpu_minor || (!only && minor < gpu_minor))
    }

    /// Major, minor, and whether it is an `a` variant.
    fn parts(self) -> (u32, u32, bool) {
        match self {
            Self::Sm75 => (7, 5, false),
            Self::Sm80 => (8, 0, false),
            Self::Sm86 => (8, 6, false),
            Self::Sm89 => (8, 9, false),
            Self::Sm90 => (9, 0, false),
            Self::Sm90a => (9, 0, true),
            Self::Sm100 => (10, 0, false),
            Self::Sm100a => (10, 0, true),
            Self::Sm103 => (10, 3, false),
            Self::Sm103a => (10, 3, true),
            Self::Sm120 => (12, 0, false),
            Self::Sm120a => (12, 0, true),
        }
    }

    /// The virtual architecture of the same features, for PTX: `compute_90a`.
    pub(crate) fn virtual_name(self) -> String {
        format!("compute_{}", self.number())
    }

    fn number(self) -> String {
        let (major, minor, only) = self.parts();
        format!("{major}{minor}{}", if only { "a" } else { "" })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.number())
    }
}

/// No architecture has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a GPU architecture; there are {}", list(&Arch::ALL))]
pub struct UnknownArch {
    /// What was given.
    pub found: String,
}

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(name: &str) -> Result<Self, UnknownArch> {
        let named = |arch: &Self| arch.to_string() == name;
        Self::ALL
            .into_iter()
            .find(named)
            .ok_or_else(|| UnknownArch { found: name.into() })
    }
}

pub(crate) fn list<T: ToString>(items: &[T]) -> String {
    let items: Vec<_> = items.iter().map(T::to_string).collect();
    items.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for arch in Arch::ALL {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        assert_eq!(Arch::Sm103a.to_string(), "sm_103a");
        assert_eq!(Arch::Sm100a.virtual_name(), "compute_100a");
        let error = "sm90a".parse::<Arch>().unwrap_err().to_string();
        assert!(
            error.contains("sm90a") && error.contains("sm_90a"),
            "{error}"
        );
    }

    #[test]
    fn a_gpu_gets_the_newest_code_it_runs() {
        let cases = [
            ((7, 0), None),
            ((7, 5), Some(Arch::Sm75)),
            ((8, 0), Some(Arch::Sm80)),
            ((8, 7), Some(Arch::Sm86)),
            ((8, 9), Some(Arch::Sm89)),
            ((9, 0), Some(Arch::Sm90a)),
            ((10, 0), Some(Arch::Sm100a)),
            ((10, 3), Some(Arch::Sm103a)),
            ((11, 0), None),
            ((12, 1), Some(Arch::Sm120)),
        ];
        for (capability, arch) in cases {
            assert_eq!(Arch::of(capability), arch, "{capability:?}");
        }
    }

    #[test]
    fn cubins_run_on_later_revisions_of_their_chip() {
        assert!(Arch::Sm80.runs_on(Arch::Sm89));
        assert!(Arch::Sm90.runs_on(Arch::Sm90a));
        assert!(Arch::Sm90a.runs_on(Arch::Sm90a));
        assert!(Arch::Sm100.runs_on(Arch::Sm103a));
        assert!(!Arch::Sm100a.runs_on(Arch::Sm103a));
        assert!(!Arch::Sm89.runs_on(Arch::Sm80));
        assert!(!Arch::Sm80.runs_on(Arch::Sm90a));
    }
}
