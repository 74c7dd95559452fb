//! A setting's description, and the macro that turns the table into structs and descriptions.

use std::path::PathBuf;

use config::{Value, ValueKind};

/// What values a setting takes, as text (flags, environment) and as TOML.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A whole number, from 0.
    Count,
    /// A finite number; whole ones are taken too.
    Real,
    /// `true` or `false`.
    Switch,
    /// A path.
    Path,
    /// One of a few names.
    Name {
        /// How the names are spelled, for people.
        spellings: fn() -> Vec<&'static str>,
        /// Whether a spelling is one of them.
        accepts: fn(&str) -> bool,
    },
}

impl Kind {
    /// What is expected, as the end of "must be ...".
    #[must_use]
    pub fn expected(&self) -> String {
        match self {
            Self::Count => "a whole number from 0 to 2^63-1".into(),
            Self::Real => "a finite number".into(),
            Self::Switch => "true or false".into(),
            Self::Path => "a path".into(),
            Self::Name { spellings, .. } => format!("one of {}", spellings().join(", ")),
        }
    }

    /// The value that `text`, from a flag or a variable, spells.
    pub(super) fn parse(&self, text: &str) -> Option<ValueKind> {
        let value = match self {
            Self::Count => ValueKind::I64(text.parse().ok()?),
            Self::Real => ValueKind::Float(text.parse().ok()?),
            Self::Switch => ValueKind::Boolean(text.parse().ok()?),
            Self::Path | Self::Name { .. } => ValueKind::String(text.into()),
        };
        self.check(value)
    }

    /// `value` in the form the structs read. `config` itself would round 3.7 to 4 and read
    /// `true` as 1, hence this check before it merges.
    pub(super) fn check(&self, value: ValueKind) -> Option<ValueKind> {
        match (self, value) {
            (Self::Count, ValueKind::I64(n)) if n >= 0 => Some(ValueKind::I64(n)),
            (Self::Real, ValueKind::Float(x)) if x.is_finite() => Some(ValueKind::Float(x)),
            (Self::Real, ValueKind::I64(n)) => Some(ValueKind::Float(n as f64)),
            (Self::Switch, ValueKind::Boolean(b)) => Some(ValueKind::Boolean(b)),
            (Self::Path, ValueKind::String(s)) if !s.is_empty() => Some(ValueKind::String(s)),
            (Self::Name { accepts, .. }, ValueKind::String(s)) if accepts(&s) => {
                Some(ValueKind::String(s))
            }
            _ => None,
        }
    }
}

/// A TOML value as an error shows it.
pub(super) fn found(value: &Value) -> String {
    match &value.kind {
        ValueKind::String(s) => format!("the string {s:?}"),
        ValueKind::Table(_) => "a table".into(),
        ValueKind::Array(_) => "an array".into(),
        other => other.to_string(),
    }
}

/// One setting of the table.
#[derive(Debug)]
pub struct Key {
    /// The key in a file, `model.kv_heads`; root keys have no section.
    pub path: &'static str,
    /// The flag without its dashes, `model-kv-heads`.
    pub flag: String,
    /// The environment variable, `FLAMIA_MODEL_KV_HEADS`.
    pub variable: String,
    /// The heading under which help and listings show it.
    pub group: &'static str,
    /// The values it takes.
    pub kind: Kind,
    /// The default as help and listings show it.
    pub default: String,
    /// The help text: a first sentence, then more paragraphs.
    pub help: Vec<String>,
}

impl Key {
    pub(super) fn new(
        path: &'static str,
        group: &'static str,
        kind: Kind,
        default: String,
        doc: &[&str],
    ) -> Self {
        let help = doc
            .split(|line| line.trim().is_empty())
            .map(|lines| {
                lines
                    .iter()
                    .map(|line| line.trim())
                    .collect::<Vec<_>>()
                    .join(" ")
            })
            .map(|paragraph| paragraph.replace('`', ""))
            .collect();
        Self {
            path,
            flag: path.replace(['.', '_'], "-"),
            variable: format!("FLAMIA_{}", path.replace('.', "_").to_uppercase()),
            group,
            kind,
            default,
            help,
        }
    }

    /// The key's section, `model`; root keys have none.
    #[must_use]
    pub fn section(&self) -> Option<&'static str> {
        self.path.split_once('.').map(|(section, _)| section)
    }

    /// The key without its section, `kv_heads`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.path.rsplit('.').next().unwrap_or(self.path)
    }
}

/// A type that a setting can have.
pub(super) trait Setting {
    /// The values it takes.
    const KIND: Kind;

    /// The value as help and listings show it; empty when there is none.
    fn show(&self) -> String;
}

impl Setting for usize {
    const KIND: Kind = Kind::Count;
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for u64 {
    const KIND: Kind = Kind::Count;
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for f64 {
    const KIND: Kind = Kind::Real;
    fn show(&self) -> String {
        // Debug switches to the exponent form where it is shorter, Display never does.
        format!("{self:?}")
    }
}

impl Setting for bool {
    const KIND: Kind = Kind::Switch;
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for Option<PathBuf> {
    const KIND: Kind = Kind::Path;
    fn show(&self) -> String {
        self.as_ref()
            .map(|path| path.display().to_string())
            .unwrap_or_default()
    }
}

/// Makes the settings' structs, their defaults and [`Key`]s from one table.
///
/// A setting is `/// help` and `key: type = default;`, where an optional path may say what its
/// absence means: `= None, meaning "...";`.
macro_rules! settings_table {
    (
        $root_group:literal {
            $(
                $(#[doc = $root_doc:literal])*
                $root_key:ident: $root_type:ty = $root_default:expr $(, meaning $unset:literal)?;
            )*
        }
        $(
            $section:ident: $Section:ident, $group:literal {
                $(
                    $(#[doc = $doc:literal])*
                    $key:ident: $type:ty = $default:expr;
                )*
            }
        )*
    ) => {
        /// All settings of a run, resolved.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Settings {
            $(
                $(#[doc = $root_doc])*
                pub $root_key: $root_type,
            )*
            $(
                #[doc = concat!("The settings of the group \"", $group, "\".")]
                pub $section: $Section,
            )*
            /// Where each value came from that is no default, by key.
            #[serde(skip)]
            pub origins: BTreeMap<&'static str, String>,
        }

        impl Default for Settings {
            fn default() -> Self {
                Self {
                    $($root_key: $root_default,)*
                    $($section: $Section::default(),)*
                    origins: BTreeMap::new(),
                }
            }
        }

        $(
            #[doc = concat!("The settings of the group \"", $group, "\".")]
            #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $Section {
                $(
                    $(#[doc = $doc])*
                    pub $key: $type,
                )*
            }

            impl Default for $Section {
                fn default() -> Self {
                    Self { $($key: $default,)* }
                }
            }
        )*

        impl Settings {
            /// Every setting's value as help and listings show it, in the table's order.
            fn shown(&self) -> Vec<String> {
                vec![
                    $(match self.$root_key.show() {
                        // What the absence of this path means.
                        $(shown if shown.is_empty() => $unset.to_string(),)?
                        shown => shown,
                    },)*
                    $($(self.$section.$key.show(),)*)*
                ]
            }
        }

        /// Every setting, in the order of the help.
        pub fn keys() -> &'static [Key] {
            static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
                let mut defaults = Settings::default().shown().into_iter();
                let mut default = || defaults.next().unwrap_or_default();
                vec![
                    $(Key::new(
                        stringify!($root_key),
                        $root_group,
                        <$root_type as Setting>::KIND,
                        default(),
                        &[$($root_doc),*],
                    ),)*
                    $($(Key::new(
                        concat!(stringify!($section), ".", stringify!($key)),
                        $group,
                        <$type as Setting>::KIND,
                        default(),
                        &[$($doc),*],
                    ),)*)*
                ]
            });
            &KEYS
        }
    };
}
pub(super) use settings_table;
