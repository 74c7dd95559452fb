//! Which keys of its own document a query may see.

use std::fmt;
use std::num::NonZero;
use std::str::FromStr;

/// Which keys of its own document a query row sees. No mask ever reaches into another document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Row `t` sees keys `0..=t`.
    Causal,
    /// Every row sees every key.
    Full,
    /// A sliding window: row `t` sees the last so many keys up to and including `t`.
    Window(NonZero<usize>),
}

impl Mask {
    /// A sliding window of `keys` keys, the query's own included.
    ///
    /// # Panics
    /// If `keys` is zero: no row would see anything.
    pub const fn window(keys: usize) -> Self {
        Mask::Window(NonZero::new(keys).expect("a window holds at least the query's own key"))
    }

    /// Whether no row sees a later one.
    pub const fn is_causal(self) -> bool {
        !matches!(self, Mask::Full)
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mask::Causal => f.pad("causal"),
            Mask::Full => f.pad("full"),
            Mask::Window(keys) => f.pad(&format!("window:{keys}")),
        }
    }
}

impl FromStr for Mask {
    type Err = UnknownMask;

    fn from_str(name: &str) -> Result<Self, UnknownMask> {
        match name {
            "causal" => Ok(Mask::Causal),
            "full" => Ok(Mask::Full),
            _ => name
                .strip_prefix("window:")
                .and_then(|keys| keys.parse().ok())
                .map(Mask::Window)
                .ok_or_else(|| UnknownMask {
                    found: name.to_owned(),
                }),
        }
    }
}

/// A name that is no [`Mask`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown attention mask `{found}`: use `causal`, `full` or `window:N` with N at least 1")]
pub struct UnknownMask {
    /// The name as it was given.
    pub found: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for (mask, name) in [
            (Mask::Causal, "causal"),
            (Mask::Full, "full"),
            (Mask::window(256), "window:256"),
        ] {
            assert_eq!(mask.to_string(), name);
            assert_eq!(name.parse(), Ok(mask));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        for name in [
            "",
            "Causal",
            "none",
            "window",
            "window:",
            "window:0",
            "window:-1",
        ] {
            let message = name.parse::<Mask>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
            assert!(
                message.contains("`causal`, `full` or `window:N`"),
                "{message}"
            );
        }
    }
}
