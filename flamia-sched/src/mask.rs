//! Which keys of its own document a query may see.

use std::fmt;
use std::str::FromStr;

/// Which keys of its own document a query row sees. No mask ever reaches into another document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Row `t` sees keys `0..=t`.
    Causal,
    /// Every row sees every key.
    Full,
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Mask::Causal => "causal",
            Mask::Full => "full",
        })
    }
}

impl FromStr for Mask {
    type Err = UnknownMask;

    fn from_str(name: &str) -> Result<Self, UnknownMask> {
        match name {
            "causal" => Ok(Mask::Causal),
            "full" => Ok(Mask::Full),
            _ => Err(UnknownMask {
                found: name.to_owned(),
            }),
        }
    }
}

/// A name that is no [`Mask`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown attention mask `{found}`: use `causal` or `full`")]
pub struct UnknownMask {
    /// The name as it was given.
    pub found: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for (mask, name) in [(Mask::Causal, "causal"), (Mask::Full, "full")] {
            assert_eq!(mask.to_string(), name);
            assert_eq!(name.parse(), Ok(mask));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        for name in ["", "Causal", "none"] {
            let message = name.parse::<Mask>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
            assert!(message.contains("`causal` or `full`"), "{message}");
        }
    }
}
