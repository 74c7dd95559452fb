//! The HTML page: charts, results, and the settings in which runs differ.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use super::{Along, ReportError, RunRecord, difference_chart, loss_chart, speed_chart};
use crate::curves::TRAIN_LOSS;

const STYLE: &str = "\
body { font: 16px/1.5 sans-serif; color: #222; max-width: 1000px; margin: 2em auto; padding: 0 1em }
svg { width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left; font-weight: normal; color: #555 }";

/// Results as (words, key in the summary, decimals).
const RESULTS: [(&str, &str, usize); 14] = [
    ("steps", "steps", 0),
    ("validation loss, first", "val_loss_first", 4),
    ("validation loss, last", "val_loss", 4),
    ("validation loss, best", "val_loss_best", 4),
    ("training loss, last", "train_loss", 4),
    ("unit", "unit", 0),
    ("tokens", "tokens", 0),
    ("tokens/s, all in", "tokens_per_s", 0),
    ("tokens/s, steps alone", "step_tokens_per_s", 0),
    ("model TFLOP/s", "model_tflops", 3),
    ("utilisation", "utilisation", 3),
    ("seconds", "seconds", 1),
    ("parameters", "parameters", 0),
    ("device", "versions.device", 0),
];

/// Settings that differ between any two runs without making them different.
const PLACES: [&str; 2] = ["out", "resume"];

/// `runs` side by side. The page needs no other file and no script.
///
/// # Errors
/// [`ReportError::Plot`].
pub fn page(runs: &[RunRecord]) -> Result<String, ReportError> {
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    let title = escaped(&names.join(", "));
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
         <style>\n{STYLE}\n</style>\n<h1>{title}</h1>\n"
    );
    html.push_str(&loss_chart(runs, Along::Steps)?);
    let has_tokens = |run: &RunRecord| !run.curve(TRAIN_LOSS, Along::Tokens).is_empty();
    if runs.iter().any(has_tokens) {
        html.push_str(&loss_chart(runs, Along::Tokens)?);
    }
    if runs.len() > 1 {
        html.push_str(&difference_chart(runs)?);
    }
    html.push_str(&speed_chart(runs)?);

    html.push_str("<h2>Results</h2>\n");
    let results = RESULTS.iter().map(|&(words, key, decimals)| {
        let shown = runs.iter().map(|run| shown(run.result(key), decimals));
        (words.to_string(), shown.collect())
    });
    html.push_str(&table(&names, results));

    html.push_str("<h2>Settings that differ</h2>\n");
    let differing = differing(runs);
    match differing.is_empty() {
        true => html.push_str("<p>None.</p>\n"),
        false => html.push_str(&table(&names, differing.into_iter())),
    }
    html.push_str("</html>\n");
    Ok(html)
}

/// Keys in which not all runs agree, with each run's value.
fn differing(runs: &[RunRecord]) -> Vec<(String, Vec<String>)> {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    keys.into_iter()
        .filter(|key| !PLACES.contains(&key.as_str()))
        .map(|key| {
            let value = |run: &RunRecord| run.settings.get(key).cloned();
            let values = runs.iter().map(|run| value(run).unwrap_or("unset".into()));
            (key.clone(), values.collect::<Vec<_>>())
        })
        .filter(|(_, values)| values.iter().any(|value| *value != values[0]))
        .collect()
}

fn table(names: &[String], rows: impl Iterator<Item = (String, Vec<String>)>) -> String {
    let mut html = "<div class=\"wide\"><table>\n<tr><th></th>".to_string();
    for name in names {
        let _ = write!(html, "<th>{}</th>", escaped(name));
    }
    html.push_str("</tr>\n");
    for (words, cells) in rows {
        let _ = write!(html, "<tr><td>{}</td>", escaped(&words));
        for cell in cells {
            let _ = write!(html, "<td>{}</td>", escaped(&cell));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div>\n");
    html
}

fn shown(value: Option<&Value>, decimals: usize) -> String {
    match value {
        None => "\u{2013}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => match value.as_f64() {
            Some(number) => format!("{number:.decimals$}"),
            None => value.to_string(),
        },
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
