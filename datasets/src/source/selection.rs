//! Which columns are read, and which records are kept.

use serde::{Deserialize, Serialize};

/// The names of the columns, or of the keys of JSON objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Columns {
    /// The documents' texts; must be there.
    pub text: String,
    /// The documents' names; may be missing.
    pub id: String,
    /// The score of a classifier.
    pub score: String,
    /// The certainty of the language.
    pub language_score: String,
    /// The number of tokens that somebody counted.
    pub token_count: String,
    /// The name of the crawl.
    pub dump: String,
}

impl Default for Columns {
    /// FineWeb-Edu's names.
    fn default() -> Self {
        Self {
            text: "text".into(),
            id: "id".into(),
            score: "score".into(),
            language_score: "language_score".into(),
            token_count: "token_count".into(),
            dump: "dump".into(),
        }
    }
}

/// Which records are kept: all that meet every condition. A null meets none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Filters {
    /// Least score.
    pub min_score: Option<f64>,
    /// Least certainty of the language.
    pub min_language_score: Option<f64>,
    /// Fewest tokens, as counted in the column.
    pub min_token_count: Option<u64>,
    /// Most tokens, as counted in the column.
    pub max_token_count: Option<u64>,
    /// The crawls to take; all, if none is named.
    pub dumps: Vec<String>,
}

/// What is read of the sources.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    /// The columns' names.
    pub columns: Columns,
    /// The conditions.
    pub filters: Filters,
}

/// A column that a condition looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Score,
    LanguageScore,
    TokenCount,
    Dump,
}

/// A value of such a column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cell<'a> {
    Null,
    Number(f64),
    Text(&'a str),
}

impl Selection {
    /// The columns that conditions look at, by name.
    pub(crate) fn conditions(&self) -> Vec<(Condition, &str)> {
        let Self { columns, filters } = self;
        let counted = filters.min_token_count.is_some() || filters.max_token_count.is_some();
        [
            (
                Condition::Score,
                &columns.score,
                filters.min_score.is_some(),
            ),
            (
                Condition::LanguageScore,
                &columns.language_score,
                filters.min_language_score.is_some(),
            ),
            (Condition::TokenCount, &columns.token_count, counted),
            (Condition::Dump, &columns.dump, !filters.dumps.is_empty()),
        ]
        .into_iter()
        .filter(|(.., used)| *used)
        .map(|(condition, column, _)| (condition, column.as_str()))
        .collect()
    }

    /// Whether a record with this value meets the condition.
    pub(crate) fn meets(&self, condition: Condition, cell: Cell<'_>) -> bool {
        let filters = &self.filters;
        match (condition, cell) {
            (Condition::Score, Cell::Number(score)) => {
                filters.min_score.is_none_or(|least| score >= least)
            }
            (Condition::LanguageScore, Cell::Number(score)) => filters
                .min_language_score
                .is_none_or(|least| score >= least),
            (Condition::TokenCount, Cell::Number(count)) => {
                filters
                    .min_token_count
                    .is_none_or(|least| count >= least as f64)
                    && filters
                        .max_token_count
                        .is_none_or(|most| count <= most as f64)
            }
            (Condition::Dump, Cell::Text(dump)) => filters.dumps.iter().any(|name| name == dump),
            _ => false,
        }
    }
}
