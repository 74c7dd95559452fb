//! A CUDA version, which NVRTC and the driver both count in.

use std::fmt;

/// Major and minor, as in CUDA 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Cubins of one major version run with every driver of it.
    pub major: i32,
    #[allow(missing_docs)]
    pub minor: i32,
}

/// The oldest NVRTC and driver that serve.
pub(crate) const OLDEST: Version = Version {
    major: 13,
    minor: 0,
};

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
