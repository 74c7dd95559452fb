//! Settings whose value is a name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::key::{Kind, Setting};

/// A name that is none of those a setting takes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("found {found:?}, expected {expected}")]
pub struct UnknownName {
    /// The name given.
    pub found: String,
    /// The names taken.
    pub expected: String,
}

macro_rules! choice {
    (
        $(#[$meta:meta])*
        $Name:ident { $($(#[$variant_meta:meta])* $Variant:ident = $spelling:literal,)* }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub enum $Name { $($(#[$variant_meta])* $Variant,)* }

        impl $Name {
            /// The spellings, in the order of the variants.
            pub const SPELLINGS: &'static [&'static str] = &[$($spelling),*];
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$Variant => $spelling,)* })
            }
        }

        impl FromStr for $Name {
            type Err = UnknownName;

            fn from_str(name: &str) -> Result<Self, UnknownName> {
                match name {
                    $($spelling => Ok(Self::$Variant),)*
                    _ => Err(unknown::<Self>(name)),
                }
            }
        }

        named!($Name, Self::SPELLINGS);
    };
}

macro_rules! named {
    ($Name:ident, $spellings:expr) => {
        impl Setting for $Name {
            const KIND: Kind = Kind::Name {
                spellings: $spellings,
                accepts: |name| name.parse::<Self>().is_ok(),
            };

            fn show(&self) -> String {
                self.to_string()
            }
        }

        impl TryFrom<String> for $Name {
            type Error = UnknownName;

            fn try_from(name: String) -> Result<Self, UnknownName> {
                name.parse()
            }
        }

        impl From<$Name> for String {
            fn from(value: $Name) -> Self {
                value.to_string()
            }
        }
    };
}

fn unknown<T: Setting>(name: &str) -> UnknownName {
    UnknownName {
        found: name.into(),
        expected: T::KIND.expected(),
    }
}

choice! {
    /// Which attention every layer calls.
    Attention {
        /// Exact attention in FP32.
        Reference = "reference",
        /// MXFP8 operands, forward and backward.
        Mxfp8 = "mxfp8",
        /// Torch's own, called per document.
        Sdpa = "sdpa",
    }
}

choice! {
    /// How the MXFP8 path applies operand scales.
    Profile {
        /// The matrix multiply applies one scale per group of 32 (Blackwell).
        BlockScaled = "block-scaled",
        /// Scales are folded into FP32 operands (Hopper, which has no block scaling).
        Hopper = "hopper",
    }
}

choice! {
    /// Whether Q and K are rotated by the normalised Hadamard transform before quantising.
    Hadamard {
        /// On at head dimension 128, off at 64.
        Auto = "auto",
        /// Always.
        On = "on",
        /// Never.
        Off = "off",
    }
}

choice! {
    /// The number format in which partial sums of dQ are accumulated.
    Dq {
        /// FP16 with a power-of-two prescale.
        Fp16 = "fp16",
        /// FP32.
        Fp32 = "fp32",
    }
}

/// Where tensors live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// The first GPU that torch can use, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this index.
    Cuda(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match name.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(index)) => Ok(Self::Cuda(index)),
                _ => Err(unknown::<Self>(name)),
            },
        }
    }
}

named!(Device, &["auto", "cpu", "cuda", "cuda:N"]);
