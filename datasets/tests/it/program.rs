//! The program's subcommands, end to end.

use std::path::Path;
use std::process::Command;

use tempfile::tempdir;

use crate::fixtures::write_texts;

fn run(args: &[&str], folder: &Path) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_datasets"))
        .args(args)
        .current_dir(folder)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn prepare_stats_show_and_check_go_together() {
    let folder = tempdir().unwrap();
    let here = folder.path();
    // Lengths 0, 10, 20 .. 990 and one of 5,000 without the number in front.
    let mut texts: Vec<String> = (0..100).map(|n| "x".repeat(10 * n.max(1))).collect();
    texts.push("long ".repeat(1000));
    write_texts(here, "a.parquet", &texts);
    let (code, stdout, stderr) = run(&["prepare", "--data", "a.parquet", "--out", "c"], here);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        stdout.contains("c: 101 documents, 54510 tokens"),
        "{stdout}"
    );

    let line = ["stats", "c", "--row-tokens", "512,8192", "--plot", "p.svg"];
    let (code, stdout, stderr) = run(&line, here);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        stdout.contains("101 documents, 54,510 tokens; mean 540"),
        "{stdout}"
    );
    assert!(stdout.contains("shortest 10, longest 5,000"), "{stdout}");
    assert!(stdout.contains("50 %: 500"), "{stdout}");
    let svg = std::fs::read_to_string(here.join("p.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("best-fit") && svg.contains("Padding"));
    let (_, json, _) = run(&[&line[..4], &["--json"]].concat(), here);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    // 54,510 tokens and 101 EOS fill 106 rows of 512 and a part of one more.
    let concat = &json["packed"][0];
    assert_eq!(
        (&concat["packing"], &concat["row_tokens"]),
        (&"concat".into(), &512.into())
    );
    assert_eq!(concat["report"]["rows"], 107);
    assert_eq!(concat["report"]["padding"], 107 * 512 - 54_611);
    assert_eq!(
        json["packed"][3]["report"]["pieces"], 101,
        "8,192 cuts none: {json}"
    );

    let (code, stdout, stderr) = run(&["show", "c", "2", "--row-tokens", "512"], here);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        stdout.starts_with("row 2 of epoch 0: 512 tokens"),
        "{stdout}"
    );
    assert!(stdout.contains("of the document at token"), "{stdout}");
    let (code, _, stderr) = run(&["show", "c", "100000", "--row-tokens", "512"], here);
    assert_eq!(code, Some(1));
    assert!(
        stderr.contains("cannot resume at row 100000 of epoch 0"),
        "{stderr}"
    );

    assert_eq!(
        run(&["check", "c"], here).1,
        "shard-00000: whole\nall 1 shards are whole\n"
    );
    let bin = here.join("c/shard-00000.bin");
    let mut bytes = std::fs::read(&bin).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(bin, bytes).unwrap();
    let (code, stdout, stderr) = run(&["check", "c"], here);
    assert_eq!(code, Some(1), "{stdout}");
    assert!(
        stdout.contains("shard-00000.bin is damaged: its SHA-256 is"),
        "{stdout}"
    );
    assert!(
        stderr.contains("1 of 1 shards of c are damaged"),
        "{stderr}"
    );
}

#[test]
fn errors_are_one_line_and_exit_with_one() {
    let folder = tempdir().unwrap();
    for args in [
        &["stats", "none"][..],
        &["check", "none"],
        &["show", "none", "0"],
        &["prepare", "--data", "none.parquet", "--out", "c"],
        &["prepare", "--data", "hf://none", "--out", "c"],
    ] {
        let (code, stdout, stderr) = run(args, folder.path());
        assert_eq!((code, stdout.as_str()), (Some(1), ""), "{args:?}");
        assert!(
            stderr.starts_with("error: ") && stderr.contains("none"),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
