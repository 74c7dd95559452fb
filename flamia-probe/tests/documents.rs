//! A loud document among quiet ones.

use clap::Parser;
use flamia_probe::documents::LoudDocument;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    probe: LoudDocument,
}

fn probe(line: &str) -> LoudDocument {
    let line = std::iter::once("documents").chain(line.split_whitespace());
    Line::try_parse_from(line).unwrap().probe
}

/// Published for dK: 0.99805 with local scales, 0.99151 with one scale for the tensor.
#[test]
fn neighbours_of_a_loud_document_keep_their_cosine_only_with_local_scales() {
    let rows = probe("").rows().unwrap();
    let find = |scheme: &str, tensor: &str| {
        rows.iter()
            .find(|row| row.scheme == scheme && row.tensor == tensor)
            .unwrap()
    };
    let (local, whole) = (find("mxfp8", "dk"), find("mxfp8-per-tensor", "dk"));
    println!(
        "{} local, {} with one scale",
        local.cosine_others, whole.cosine_others
    );
    assert!((local.cosine_others - 0.998).abs() < 5e-4, "{local:?}");
    assert!((whole.cosine_others - 0.9915).abs() < 2e-3, "{whole:?}");
    assert!(whole.cosine_quiet > 0.997);
    for row in &rows {
        let local = !row.scheme.ends_with("per-tensor");
        assert_eq!(row.others_bitwise, local, "{row:?}");
        if local {
            assert_eq!(row.cosine_others, row.cosine_quiet);
        }
    }
}

#[test]
fn a_document_that_is_not_there_is_refused() {
    for line in ["--loud 4", "--lengths 64 --loud 0"] {
        let error = probe(line).rows().unwrap_err().to_string();
        assert!(error.contains("loud"), "{error}");
    }
}
