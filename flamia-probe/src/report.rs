//! Rows as a table for people and as JSON for programs.

use std::io::Write;
use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use flamia_train::atomic::{WriteError, atomic_write_with};
use serde::Serialize;
use serde_json::Value;

/// Where the rows go beside the table.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Output {
    /// Write the rows to FILE as a JSON list
    #[arg(long, value_name = "FILE", display_order = 1000)]
    pub json: Option<PathBuf>,
}

impl Output {
    /// Prints `rows` as a table under `caption` on standard output, and writes the JSON if asked to.
    ///
    /// # Errors
    /// The JSON cannot be written.
    pub fn show<R: Serialize>(&self, caption: &str, rows: &[R]) -> Result<(), WriteError> {
        self.show_summary(caption, rows, rows)
    }

    /// [`show`](Self::show), but the table is of `summary`, the JSON of `rows`.
    ///
    /// # Errors
    /// The JSON cannot be written.
    pub fn show_summary<S: Serialize, R: Serialize>(
        &self,
        caption: &str,
        summary: &[S],
        rows: &[R],
    ) -> Result<(), WriteError> {
        let summary: Vec<Value> = summary.iter().map(flat).collect();
        // Nobody reading any more, as after `| head`, is no error.
        let _ = writeln!(
            std::io::stdout().lock(),
            "{caption} ({})\n{}",
            version(),
            table(&summary)
        );
        match &self.json {
            None => Ok(()),
            Some(path) => atomic_write_with(path, |writer| {
                serde_json::to_writer_pretty(&mut *writer, rows)?;
                writer.write_all(b"\n")
            }),
        }
    }
}

/// The package's version, and the commit if it was built in a git checkout.
pub fn version() -> String {
    let version = concat!("flamia ", env!("CARGO_PKG_VERSION"));
    match commit() {
        Some(commit) => format!("{version}, commit {commit}"),
        None => version.to_owned(),
    }
}

/// The commit, if this was built in a git checkout.
pub fn commit() -> Option<&'static str> {
    option_env!("BUILD_COMMIT")
}

/// A row as a JSON object. Numbers that JSON lacks become null.
fn flat<R: Serialize>(row: &R) -> Value {
    serde_json::to_value(row).unwrap_or(Value::Null)
}

/// One line per row, one column per key. Columns that are empty throughout are left out; names and
/// whole numbers that are the same throughout stand above the table, once.
fn table(rows: &[Value]) -> String {
    let mut keys: Vec<&str> = Vec::new();
    for (key, value) in rows.iter().filter_map(Value::as_object).flatten() {
        if !value.is_null() && !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let (shared, keys): (Vec<&str>, Vec<&str>) =
        keys.into_iter().partition(|key| is_shared(rows, key));
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(&keys);
    for row in rows {
        table.add_row(keys.iter().map(|key| cell(&row[*key])));
    }
    for (index, key) in keys.iter().enumerate() {
        let numeric = rows.iter().any(|row| row[*key].is_number());
        if let Some(column) = table.column_mut(index).filter(|_| numeric) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let shared: Vec<String> = shared
        .iter()
        .map(|key| format!("{key} {}", cell(&rows[0][*key])))
        .collect();
    match shared.is_empty() {
        true => table.to_string(),
        false => format!("{}\n{table}", shared.join(", ")),
    }
}

/// Whether every one of several rows has the same name or whole number under `key`. Measurements that
/// happen to agree stay in their column.
fn is_shared(rows: &[Value], key: &str) -> bool {
    let setting = |value: &Value| value.is_string() || value.is_u64();
    rows.len() > 1 && setting(&rows[0][key]) && rows.iter().all(|row| row[key] == rows[0][key])
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            Some(x) if number.is_f64() => decimal(x),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

/// Five decimals where they say something, else a power of ten.
fn decimal(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        magnitude if (1e-3..1e5).contains(&magnitude) => format!("{x:.5}"),
        _ => format!("{x:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Row {
        path: &'static str,
        length: usize,
        o: f64,
        dq: Option<f64>,
        never: Option<f64>,
        bitwise: bool,
    }

    const ROWS: [Row; 2] = [
        Row {
            path: "mxfp8",
            length: 4096,
            o: 0.1 + 0.2,
            dq: Some(2.5e-7),
            never: None,
            bitwise: true,
        },
        Row {
            path: "fp4",
            length: 32,
            o: f64::NAN,
            dq: None,
            never: None,
            bitwise: false,
        },
    ];

    #[test]
    fn the_json_is_a_list_of_flat_rows_with_numbers_as_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.json");
        let output = Output {
            json: Some(path.clone()),
        };
        output.show("a caption", &ROWS).unwrap();
        let rows: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let keys: Vec<_> = rows[0].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["path", "length", "o", "dq", "never", "bitwise"]);
        assert_eq!(rows[0]["o"], 0.1 + 0.2);
        assert_eq!(rows[0]["length"], 4096);
        assert_eq!(rows[1]["o"], Value::Null);
        assert_eq!(rows[1]["bitwise"], false);
    }

    #[test]
    fn the_table_shows_every_key_that_says_something() {
        let table = table(&ROWS.each_ref().map(flat));
        for text in ["mxfp8", "0.30000", "2.50e-7", "4096", "yes", "no"] {
            assert!(table.contains(text), "{text} in\n{table}");
        }
        assert!(!table.contains("never"));
    }

    #[test]
    fn what_all_rows_share_stands_above_the_table() {
        let rows = ROWS.each_ref().map(|row| {
            let mut row = flat(row);
            row["length"] = 64.into();
            row["o"] = 0.5.into();
            row
        });
        let table = table(&rows);
        assert!(table.starts_with("length 64\n"), "{table}");
        assert_eq!(table.matches("64").count(), 1);
        assert_eq!(table.matches("0.50000").count(), 2, "{table}");
    }

    #[test]
    fn a_missing_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let json = Some(folder.path().join("no/rows.json"));
        let error = Output { json }.show("", &ROWS).unwrap_err();
        assert!(error.to_string().contains("no/rows.json"), "{error}");
    }
}
