//! Rows as people read them, and what each optimisation buys on average.

use serde::Serialize;

use super::row::{Pass, Row};
use crate::attention::table::{geometric, times};
use crate::bars::{Bar, Bars};

/// What is not in the table, and why.
pub const NOTES: &str = "\
not in the table:
- exponentials on the FMA pipeline (the paper's section 3.5.2): the kernels have none. With a polynomial of
  degree 3 for an eighth or a quarter of them, the forward kernel's skeleton took 1 to 6 % longer on an H200;
- D, LSE in base 2 and the Hadamard rotation: parts of the quantisers, which are not made without them;
- the backward kernels' acquisition: always dynamic;
- what a call does not have: `one-kernel` and `fp16-sums` where the rule picks two backward kernels, by the mean
  length of documents, `overlap` and `two-kernels` where it picks one.
With one backward kernel `one-image` and `one-pass` are about V alone: it reads one image of Q and of K.";

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    workload: &'static str,
    pass: Pass,
    without: String,
    backward: Option<String>,
    ms: String,
    ratio: Option<String>,
    /// What a reader of the time should know.
    note: Option<&'static str>,
}

/// The rows of one workload and pass together, the call as it is first.
pub fn lines(rows: &[Row]) -> Vec<Line> {
    let line = |row: &Row| Line {
        workload: row.workload,
        pass: row.pass,
        without: row.without.clone().unwrap_or("- (as it is)".to_owned()),
        backward: row.backward.clone(),
        ms: format!("{:8.4}", row.ms),
        ratio: row.without.is_some().then(|| times(row.ratio)),
        note: (!row.graph).then_some("no graph"),
    };
    rows.iter().map(line).collect()
}

/// What one optimisation buys over all workloads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mean {
    pass: Pass,
    without: String,
    instead: &'static str,
    #[serde(rename = "time, geometric mean")]
    mean: String,
    least: String,
    most: String,
    #[serde(rename = "pays on")]
    pays: String,
}

/// A line for each pass and for each of what was left out, in the order of their first appearance.
pub fn means(rows: &[Row]) -> Vec<Mean> {
    let mut kinds: Vec<(Pass, &str, &'static str)> = Vec::new();
    for row in rows {
        if let (Some(without), Some(instead)) = (&row.without, row.instead)
            && !kinds.contains(&(row.pass, without, instead))
        {
            kinds.push((row.pass, without, instead));
        }
    }
    kinds.sort_by_key(|(pass, ..)| *pass == Pass::Train);
    let mean = |(pass, without, instead): (Pass, &str, &'static str)| {
        let ratios: Vec<_> = rows
            .iter()
            .filter(|row| row.pass == pass && row.without.as_deref() == Some(without))
            .map(|row| row.ratio)
            .collect();
        let pays = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        Mean {
            pass,
            without: without.to_owned(),
            instead,
            mean: times(geometric(&ratios)),
            least: times(ratios.iter().copied().fold(f64::INFINITY, f64::min)),
            most: times(ratios.iter().copied().fold(0.0, f64::max)),
            pays: format!("{pays} of {}", ratios.len()),
        }
    };
    kinds.into_iter().map(mean).collect()
}

/// The drawing: a panel for each pass, in it a group for each workload, a bar for each that was left out.
pub fn costs(rows: &[Row]) -> Bars {
    let bar = |row: &Row| {
        Some(Bar {
            panel: format!("causal, {}, quantisation included", row.pass),
            group: row.workload,
            name: row.without.clone()?,
            value: (row.ratio - 1.0) * 100.0,
        })
    };
    let mut bars: Vec<_> = rows.iter().filter_map(bar).collect();
    // Rows come workload by workload.
    bars.sort_by(|a, b| a.panel.cmp(&b.panel));
    let gpu = rows.first().map_or("", |row| row.gpu.as_str());
    Bars {
        title: format!("time that leaving out an optimisation adds, {gpu}"),
        unit: "per cent",
        bars,
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::compared;
    use super::super::row::tests::timings;
    use super::*;
    use crate::attention::row::tests::setting;

    #[test]
    fn the_call_as_it_is_has_no_ratio() {
        let mut timings = timings();
        timings[1].graph = false;
        let lines = lines(&compared(&timings, &setting()));
        assert_eq!(
            (lines[0].ms.trim(), lines[0].ratio.as_deref()),
            ("0.5000", None)
        );
        assert!(lines[0].without.contains("as it is"));
        assert_eq!(lines[1].without, "longest-first");
        assert_eq!(lines[1].ratio.as_deref(), Some("1.50x"));
        assert_eq!((lines[1].note, lines[0].note), (Some("no graph"), None));
    }

    #[test]
    fn means_are_geometric() {
        let means = means(&compared(&timings(), &setting()));
        let told: Vec<_> = means
            .iter()
            .map(|m| (m.pass, m.without.as_str(), m.mean.as_str(), m.pays.as_str()))
            .collect();
        // The root of 1.5 * 0.75.
        assert_eq!(
            told,
            [
                (Pass::Fwd, "longest-first", "1.06x", "1 of 2"),
                (Pass::Train, "one-kernel", "1.12x", "1 of 1"),
            ]
        );
        assert_eq!(
            (means[0].least.as_str(), means[0].most.as_str()),
            ("0.75x", "1.50x")
        );
    }

    #[test]
    fn costs_may_be_gains() {
        let costs = costs(&compared(&timings(), &setting()));
        let told: Vec<_> = costs
            .bars
            .iter()
            .map(|bar| (bar.group, bar.value))
            .collect();
        assert_eq!(
            told,
            [("4x4096", 50.0), ("16x1024", -25.0), ("4x4096", 12.5)]
        );
        assert!(costs.title.contains("NVIDIA H200"));
    }
}
