//! Which schemes leak, and which do not.

use clap::Parser;
use flamia_probe::leakage::{Leakage, Row, Scheme, summary};
use flamia_probe::{ProbeError, dense};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    probe: Leakage,
}

fn probe(line: &str) -> Leakage {
    let line = std::iter::once("leakage").chain(line.split_whitespace());
    Line::try_parse_from(line).unwrap().probe
}

fn rows(line: &str) -> Vec<Row> {
    probe(line).rows(Vec::new()).unwrap()
}

/// The row of one result under one perturbed operand.
fn find<'a>(rows: &'a [Row], scheme: &str, perturbed: &str, tensor: &str) -> &'a Row {
    rows.iter()
        .find(|row| {
            row.scheme == scheme
                && row.case == "gaussian"
                && row.perturbed == perturbed
                && row.tensor == tensor
        })
        .unwrap()
}

#[test]
fn exact_options_keep_every_bit_on_packed_documents() {
    let rows = rows(
        "--scheme reference,mxfp8-exact,nvfp4-exact,fp4-exact --trials 20 --factor 100000 \
         --lengths 70,33,1,40",
    );
    assert!(rows.len() > 60);
    for row in rows {
        assert!(
            row.bitwise && row.change == 0.0 && row.reach == 0,
            "{row:?}"
        );
    }
}

#[test]
fn block_scales_leak_inside_the_block_only() {
    let rows = rows("--scheme mxfp8,mxfp8-hopper,nvfp4 --trials 20 --factor 64 --lengths 130,64");
    for scheme in ["mxfp8", "mxfp8-hopper", "nvfp4"] {
        let v = find(&rows, scheme, "v", "o");
        assert!(!v.bitwise && v.change > 0.0 && v.change < 0.01, "{v:?}");
    }
    // dQ's accumulator may reach farther.
    for row in rows.iter().filter(|row| row.tensor != "dq") {
        assert!(row.reach <= 31, "{row:?}");
    }
    // Per-token NVFP4 scales of Q and K cannot leak into scores.
    for tensor in ["o", "lse"] {
        assert!(find(&rows, "nvfp4", "k", tensor).bitwise);
    }
}

#[test]
fn leaks_are_where_the_paper_sees_them() {
    let rows = rows(
        "--scheme fp4,mxfp8,mxfp8-per-tensor,mxfp8-floor,fp4-grouped-v,1x32-v-along-keys,\
         1x32-v-along-keys-floor --trials 40 --factor 4 --lengths 130 --heads 1",
    );
    let o = |scheme| find(&rows, scheme, "v", "o");
    for scheme in ["fp4", "mxfp8", "1x32-v-along-keys"] {
        assert!(o(scheme).change < 1e-3, "{:?}", o(scheme));
    }
    for (scheme, least) in [
        ("mxfp8-per-tensor", 1e-2),
        ("mxfp8-floor", 1e-3),
        ("fp4-grouped-v", 1e-2),
        ("1x32-v-along-keys-floor", 1e-3),
    ] {
        assert!(o(scheme).change > least, "{:?}", o(scheme));
    }
    assert!(o("mxfp8-per-tensor").reach > 60);
    assert!((1..=31).contains(&o("fp4-grouped-v").reach));
}

#[test]
fn the_public_case_loses_a_small_value_to_its_block_only() {
    let rows =
        rows("--trials 0 --scheme reference,mxfp8,mxfp8-exact,mxfp8-per-tensor,fp4,fp4-grouped-v");
    let find = |scheme: &str, key: usize| {
        let case = format!("public: key {key}");
        rows.iter()
            .find(|row| row.scheme == scheme && row.case == case)
            .unwrap()
    };
    // The first row attends to key 0 alone.
    let value = 2f64.powi(-20);
    for scheme in ["reference", "mxfp8-exact", "fp4"] {
        for key in [16, 32] {
            let row = find(scheme, key);
            assert!(row.bitwise && row.before == row.after, "{row:?}");
            // The 4-bit path rounds P, and with it the weight of key 0.
            let slack = if scheme == "fp4" { 0.25 * value } else { 0.0 };
            assert!((row.after - value).abs() <= slack, "{row:?}");
        }
    }
    // 2^-20 is 2^-12 in a block whose exponent is -8: below half of the smallest code.
    let row = find("mxfp8", 16);
    assert_eq!((row.before, row.after), (value, 0.0));
    assert_eq!((row.change, row.reach, row.bitwise), (1.0, 16, false));
    assert!(find("mxfp8", 32).bitwise);
    assert_eq!(find("mxfp8-per-tensor", 32).after, 0.0);
    assert_eq!(find("fp4-grouped-v", 16).after, 0.0);
    assert!(find("fp4-grouped-v", 32).bitwise);
}

#[test]
fn an_attention_from_outside_is_probed_like_the_others() {
    // The output of every row tells the last token's V away.
    let leaky = Scheme::new("leaky", |problem| {
        let mut outputs = dense::attention(problem, problem, flamia_kernels::Mask::Causal);
        let last = f64::from(*problem.v.last().unwrap());
        outputs.o.iter_mut().for_each(|o| *o += last);
        Ok(outputs)
    });
    let broken = Scheme::new("broken", |_| Err(ProbeError::Foreign("no device".into())));
    let probe = probe("--scheme leaky --lengths 2 --kv-heads 1 --heads 1 --head-dim 1 --trials 1");
    let rows = probe.rows(vec![leaky]).unwrap();
    let o = find(&rows, "leaky", "v", "o");
    assert!(!o.bitwise && o.change > 0.5 && o.reach == 1, "{o:?}");
    let lse = find(&rows, "leaky", "v", "lse");
    assert!(lse.bitwise);

    let table = summary(&rows);
    assert_eq!(table.len(), 3);
    assert!(table[0].v.as_ref().unwrap().ends_with(", 1 rows"));
    assert_eq!(table[0].k.as_deref(), Some("unchanged"));
    assert_eq!(table[1].k, None);

    let probe = self::probe("--scheme broken");
    assert!(
        probe
            .rows(vec![broken])
            .unwrap_err()
            .to_string()
            .contains("no device")
    );
}

#[test]
fn what_cannot_be_probed_is_refused() {
    let error = |line| probe(line).rows(Vec::new()).unwrap_err().to_string();
    let unknown = error("--scheme mxfp9");
    assert!(
        unknown.contains("mxfp9") && unknown.contains("mxfp8-exact"),
        "{unknown}"
    );
    assert!(error("--factor 1.5").contains("factor is 1.5"));
    assert!(error("--heads 3 --kv-heads 2 --scheme mxfp8").contains('3'));
    assert!(error("--head-dim 100 --scheme mxfp8").contains("100"));
    assert!(error("--input capture:none.safetensors").contains("none.safetensors"));
}
