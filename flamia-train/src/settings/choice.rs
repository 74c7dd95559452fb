//! Settings whose value is a name.
//!
//! Names of numerics are the kernels' own: this file adds the words that only settings have.

use std::fmt;
use std::str::FromStr;

use flamia_kernels::{Ablation, AttentionError, Path};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::key::{Kind, Setting};

/// A name that is none of those a setting takes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("found {found:?}, expected one of {}", expected.join(", "))]
pub struct UnknownName {
    /// The name given.
    pub found: String,
    /// The names taken.
    pub expected: Vec<&'static str>,
}

/// A type whose values are names.
pub trait Spelled: fmt::Display + FromStr<Err = UnknownName> {
    /// The spellings, for people.
    fn spellings() -> Vec<&'static str>;
}

impl<T: Spelled> Setting for T {
    const KIND: Kind = Kind::Name {
        spellings: T::spellings,
        accepts: |name| name.parse::<T>().is_ok(),
    };

    fn show(&self) -> String {
        self.to_string()
    }
}

fn unknown<T: Spelled>(name: &str) -> UnknownName {
    UnknownName {
        found: name.into(),
        expected: T::spellings(),
    }
}

/// Reads and writes a [`Spelled`] type as its name.
macro_rules! serde_by_name {
    ($Name:ident $(<$T:ident: $Bound:ident>)?) => {
        impl $(<$T: $Bound>)? Serialize for $Name $(<$T>)? {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de $(, $T: $Bound)?> Deserialize<'de> for $Name $(<$T>)? {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

/// Spells a type whose variants are words of the settings alone.
macro_rules! words {
    ($Name:ident { $($Variant:ident = $word:literal),+ }) => {
        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$Variant => $word,)+ })
            }
        }

        impl FromStr for $Name {
            type Err = UnknownName;

            fn from_str(name: &str) -> Result<Self, UnknownName> {
                match name {
                    $($word => Ok(Self::$Variant),)+
                    _ => Err(unknown::<Self>(name)),
                }
            }
        }

        impl Spelled for $Name {
            fn spellings() -> Vec<&'static str> {
                vec![$($word),+]
            }
        }

        serde_by_name!($Name);
    };
}

/// An option of the kernels that has names.
pub trait KernelName: Copy + fmt::Display + FromStr<Err = AttentionError> {
    /// The names, as the kernels list them where they refuse one.
    fn names() -> &'static [&'static str] {
        match "".parse::<Self>() {
            Err(AttentionError::UnknownName { known, .. }) => known,
            _ => &[],
        }
    }
}

impl<T: Copy + fmt::Display + FromStr<Err = AttentionError>> KernelName for T {}

/// One of the kernels' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Named<T>(pub T);

impl<T: KernelName> fmt::Display for Named<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: KernelName> FromStr for Named<T> {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        name.parse().map(Self).map_err(|_| unknown::<Self>(name))
    }
}

impl<T: KernelName> Spelled for Named<T> {
    fn spellings() -> Vec<&'static str> {
        T::names().to_vec()
    }
}

serde_by_name!(Named<T: KernelName>);

/// One of the kernels' names, or `auto`: what the path, or `kernel.exact`, has by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Auto<T> {
    /// `auto`.
    Auto,
    /// This one.
    Is(T),
}

impl<T> Auto<T> {
    /// The name chosen, or else `default`.
    pub fn unwrap_or(self, default: T) -> T {
        match self {
            Self::Auto => default,
            Self::Is(name) => name,
        }
    }
}

impl<T: KernelName> fmt::Display for Auto<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Is(name) => name.fmt(f),
        }
    }
}

impl<T: KernelName> FromStr for Auto<T> {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "auto" => Ok(Self::Auto),
            _ => name
                .parse()
                .map(Self::Is)
                .map_err(|_| unknown::<Self>(name)),
        }
    }
}

impl<T: KernelName> Spelled for Auto<T> {
    fn spellings() -> Vec<&'static str> {
        [&["auto"], T::names()].concat()
    }
}

serde_by_name!(Auto<T: KernelName>);

/// Whether something is done, or `auto`: what the path, or `kernel.exact`, has by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AutoSwitch {
    /// `auto`.
    Auto,
    /// `on`.
    On,
    /// `off`.
    Off,
}

words!(AutoSwitch { Auto = "auto", On = "on", Off = "off" });

impl AutoSwitch {
    /// Whether it is on, or else `default`.
    pub fn unwrap_or(self, default: bool) -> bool {
        match self {
            Self::Auto => default,
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// How documents are laid into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Whole documents, the longest that fits first; only those longer than a row are cut.
    BestFit,
    /// One after another, cut at row ends.
    Concat,
}

words!(Packing { BestFit = "best-fit", Concat = "concat" });

/// A model that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Preset {
    /// The defaults: minutes on a CPU.
    Tiny,
    /// 77 million parameters on bytes.
    Byte75m,
    /// 1.2 billion parameters, Llama 3's vocabulary.
    Llama1b,
    /// 8 billion parameters, Llama 3's shape.
    Llama8b,
}

words!(Preset {
    Tiny = "tiny",
    Byte75m = "byte-75m",
    Llama1b = "llama-1b",
    Llama8b = "llama-8b"
});

/// What matrix products are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// BF16 on a GPU, FP32 on the CPU.
    Auto,
    /// FP32 throughout.
    Fp32,
    /// BF16, from FP32 weights.
    Bf16,
}

words!(Precision { Auto = "auto", Fp32 = "fp32", Bf16 = "bf16" });

/// Which attention every layer calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attention {
    /// This project's, on one of its paths.
    Path(Path),
    /// Torch's own, called per document.
    Sdpa,
    /// Torch's FlashAttention 2 on packed documents, on GPUs alone.
    Flash,
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.fmt(f),
            Self::Sdpa => f.write_str("sdpa"),
            Self::Flash => f.write_str("flash"),
        }
    }
}

impl FromStr for Attention {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "sdpa" => Ok(Self::Sdpa),
            "flash" => Ok(Self::Flash),
            _ => name
                .parse()
                .map(Self::Path)
                .map_err(|_| unknown::<Self>(name)),
        }
    }
}

impl Spelled for Attention {
    fn spellings() -> Vec<&'static str> {
        [Path::names(), &["sdpa", "flash"]].concat()
    }
}

serde_by_name!(Attention);

/// A defect to study, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ablate(pub Option<Ablation>);

impl fmt::Display for Ablate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("none"),
            Some(ablation) => ablation.fmt(f),
        }
    }
}

impl FromStr for Ablate {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "none" => Ok(Self(None)),
            _ => name
                .parse()
                .map(|ablation| Self(Some(ablation)))
                .map_err(|_| unknown::<Self>(name)),
        }
    }
}

impl Spelled for Ablate {
    fn spellings() -> Vec<&'static str> {
        [&["none"], Ablation::names()].concat()
    }
}

serde_by_name!(Ablate);

/// Where tensors live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

impl Spelled for Device {
    fn spellings() -> Vec<&'static str> {
        vec!["auto", "cpu", "cuda", "cuda:N"]
    }
}

serde_by_name!(Device);
