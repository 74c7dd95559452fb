//! The program: tables, JSON and errors.

use std::process::{Command, Output};

fn probe(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flamia-probe"))
        .args(args)
        .output()
        .unwrap()
}

fn keys(probe_name: &str, args: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("rows.json");
    let args = [&[probe_name], args, &["--json", json.to_str().unwrap()]].concat();
    let output = probe(&args);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("(flamia ") && table.contains('┌'), "{table}");
    let rows: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    let keys = |row: &serde_json::Value| -> Vec<String> {
        let row = row.as_object().unwrap();
        assert!(
            row.values()
                .all(|value| !value.is_object() && !value.is_array())
        );
        row.keys().cloned().collect()
    };
    assert!(rows.iter().all(|row| keys(row) == keys(&rows[0])));
    keys(&rows[0])
}

#[test]
fn every_json_is_flat_rows_with_the_documented_keys() {
    assert_eq!(
        keys("accuracy", &["--length", "64", "--mask", "causal"]),
        [
            "input", "path", "profile", "mask", "length", "heads", "kv_heads", "head_dim",
            "ablate", "o", "dq", "dk", "dv", "o_rel", "dq_rel", "dk_rel", "dv_rel"
        ]
    );
    assert_eq!(
        keys(
            "leakage",
            &["--scheme", "mxfp8", "--trials", "1", "--lengths", "40"]
        ),
        [
            "scheme",
            "case",
            "perturbed",
            "tensor",
            "change",
            "reach",
            "bitwise",
            "before",
            "after",
            "trials"
        ]
    );
    assert_eq!(
        keys("flush", &["--length", "64", "--heads", "1"]),
        [
            "input",
            "tensor",
            "scheme",
            "fraction",
            "lowest",
            "highest",
            "lost_groups"
        ]
    );
    assert_eq!(
        keys("documents", &["--lengths", "32,32", "--heads", "1"]),
        [
            "scheme",
            "tensor",
            "cosine_others",
            "cosine_quiet",
            "cosine_scaled",
            "others_bitwise"
        ]
    );
    assert_eq!(
        keys("exponent", &["--length", "64"]),
        ["name", "inputs", "metric", "value", "paper"]
    );
}

#[test]
fn every_probe_teaches_what_to_look_for() {
    for name in ["accuracy", "leakage", "flush", "documents", "exponent"] {
        let output = probe(&[name, "--help"]);
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(
            output.status.success() && help.contains("--json"),
            "{name}: {help}"
        );
        assert!(
            help.contains("paper") || help.contains("section"),
            "{name}: {help}"
        );
    }
}

#[test]
fn what_was_asked_wrongly_is_one_line_and_a_code() {
    for (args, code, part) in [
        (&["accuracy", "--path", "mxfp9"][..], 2, "mxfp9"),
        (&["accuracy", "--mask", "diagonal"], 2, "diagonal"),
        (&["accuracy", "--input", "uniform"], 2, "capture:FILE"),
        (&["accuracy", "--head-dim", "80"], 1, "80"),
        (&["accuracy", "--c", "8", "--tau", "2"], 1, "log2(448)"),
        (
            &["accuracy", "--path", "mxfp8", "--ablate", "grouped-v"],
            1,
            "grouped-v",
        ),
        (&["documents", "--loud", "9"], 1, "loud"),
        (&["exponent", "--nats", "0"], 1, "nats"),
        (
            &["exponent", "--length", "64", "--svg", "no/such/folder.svg"],
            1,
            "no/such",
        ),
        (&["nothing"], 2, "nothing"),
    ] {
        let output = probe(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(part), "{args:?}: {error}");
        assert!(!error.contains("panicked"), "{error}");
    }
}

#[test]
fn a_defect_is_announced() {
    let output = probe(&[
        "accuracy",
        "--ablate",
        "unquantised-d",
        "--length",
        "64",
        "--path",
        "mxfp8",
    ]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("wrong on purpose"), "{error}");
}

#[cfg(not(feature = "torch"))]
#[test]
fn probes_that_need_torch_say_how_to_get_it() {
    for name in ["capture", "consistency"] {
        let output = probe(&[name, "runs/a", "--help"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            error.contains(&format!("cargo xtask probe {name}")),
            "{error}"
        );
        assert_eq!(output.status.code(), Some(1));
    }
}
