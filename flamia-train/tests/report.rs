//! Runs side by side: a page that a browser can show on its own.
#![cfg(feature = "torch")]

mod common;

use std::fs;

use common::run::{Workplace, args, train};
use flamia_train::report::{Along, ReportError, RunRecord, loss_chart, page, rows};

fn records(workplace: &Workplace, names: &[&str]) -> Vec<RunRecord> {
    let read = |name: &&str| RunRecord::read(&workplace.run(name)).unwrap();
    names.iter().map(read).collect()
}

#[test]
fn a_page_shows_curves_results_and_what_differs() {
    let workplace = Workplace::new();
    for (name, more) in [
        ("slow", "--steps 6"),
        (
            "fast & loose",
            "--steps 6 --optim-lr 1e-2 --compute-precision bf16",
        ),
    ] {
        train(&args(&workplace.data, &workplace.run(name), more)).unwrap();
    }
    let runs = records(&workplace, &["slow", "fast & loose"]);
    let html = page(&runs).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>"));
    assert!(html.contains("fast &amp; loose") && !html.contains("fast & loose"));
    // Losses over steps and over tokens, their difference, and throughput.
    assert_eq!(html.matches("<svg").count(), 4);
    assert_eq!(html.matches("</svg>").count(), 4);
    assert!(html.contains("Validation loss above that of slow"));
    assert!(
        !html.contains("<script") && !html.contains("src="),
        "{html}"
    );

    let lines: Vec<&str> = html
        .lines()
        .filter(|line| line.starts_with("<tr>"))
        .collect();
    let row = |words: &str| {
        let start = format!("<tr><td>{words}</td>");
        lines.iter().find(|row| row.starts_with(&start)).copied()
    };
    assert_eq!(
        row("optim.lr"),
        Some("<tr><td>optim.lr</td><td>0.002</td><td>0.01</td></tr>")
    );
    assert!(row("compute.precision").unwrap().contains("bf16"));
    assert_eq!(
        row("steps"),
        Some("<tr><td>steps</td><td>6</td><td>6</td></tr>")
    );
    assert_eq!(row("model.dim"), None, "it is the same in both");
    assert_eq!(row("out"), None, "it is another in any two runs");
    let loss = runs[0].result("val_loss").unwrap().as_f64().unwrap();
    let shown = row("validation loss, last").unwrap();
    assert!(shown.contains(&format!("<td>{loss:.4}</td>")), "{shown}");

    // Validation before the first step and after the last, here at steps 0, 4 and 6, of both runs.
    let svg = loss_chart(&runs, Along::Steps).unwrap();
    assert_eq!(svg.matches("<circle").count(), 6);
    assert!(svg.contains("nats/byte") && svg.contains("slow, validation"));
    let tokens = runs[0].curve("val/loss", Along::Tokens);
    assert_eq!(tokens.len(), 3);
    let trained = runs[0].result("tokens").unwrap().as_f64().unwrap();
    assert!((tokens[2].0 * 1e6 - trained).abs() < 1.0);

    let rows = rows(&runs);
    let at: Vec<_> = rows
        .iter()
        .map(|row| (row.run.as_str(), row.step))
        .collect();
    let names = ["slow", "fast & loose"];
    let expected = names
        .iter()
        .flat_map(|name| [0, 4, 6].map(|step| (*name, step)));
    assert_eq!(at, expected.collect::<Vec<_>>());
    assert_eq!(rows[0].tokens, None);
    assert_eq!(rows[2].tokens, Some(trained));
    assert!((rows[2].val_loss - loss).abs() < 1e-6);
    let per_step = rows[2].tokens_per_s.unwrap() / rows[2].steps_per_s.unwrap();
    assert!((per_step - trained / 6.0).abs() < 1e-3, "{per_step}");
}

#[test]
fn a_run_that_goes_on_is_shown_as_far_as_it_is() {
    let workplace = Workplace::new();
    train(&args(&workplace.data, &workplace.run("run"), "--steps 4")).unwrap();
    fs::remove_file(workplace.run("run").join("summary.json")).unwrap();
    let runs = records(&workplace, &["run"]);
    assert!(runs[0].result("val_loss").is_none());
    let html = page(&runs).unwrap();
    assert!(html.contains("<tr><td>steps</td><td>\u{2013}</td></tr>"));
    assert!(html.contains("<p>None.</p>"));
    assert_eq!(runs[0].curve("train/loss", Along::Steps).len(), 4);
}

#[test]
fn what_is_no_run_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = RunRecord::read(folder.path()).unwrap_err();
    assert!(matches!(error, ReportError::NoRun { .. }), "{error}");
    fs::write(folder.path().join("settings.toml"), "steps = ").unwrap();
    let error = RunRecord::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("settings.toml"), "{error}");
}
