//! Rows as people read them, and what they come to on average.

use serde::Serialize;

use super::row::{Masking, Pass, Quantisation, Row};
use super::workload::Shape;

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    workload: &'static str,
    mask: Masking,
    pass: Pass,
    quantisation: Option<Quantisation>,
    system: String,
    backward: Option<String>,
    ms: String,
    #[serde(rename = "TFLOP/s")]
    tflops: String,
    #[serde(rename = "over fastest peer")]
    speedup: Option<String>,
    #[serde(rename = "over BF16 peers")]
    speedup_bf16: Option<String>,
    /// What a reader of the times should know.
    note: Option<String>,
}

/// The rows of one workload, mask and pass together, the fastest first.
pub fn lines(rows: &[Row]) -> Vec<Line> {
    let mut rows: Vec<_> = rows.iter().collect();
    let place = |row: &Row| {
        let group = |other: &&Row| key(other) == key(row);
        rows.iter().position(group)
    };
    let places: Vec<_> = rows.iter().map(|row| place(row)).collect();
    let mut order: Vec<_> = (0..rows.len()).collect();
    order.sort_by(|&a, &b| {
        let by_time = rows[a].ms.total_cmp(&rows[b].ms);
        places[a].cmp(&places[b]).then(by_time)
    });
    rows = order.into_iter().map(|index| rows[index]).collect();
    let line = |row: &Row| Line {
        workload: row.workload,
        mask: row.mask,
        pass: row.pass,
        quantisation: row.quantisation,
        system: row.system.clone(),
        backward: row.backward.clone(),
        ms: format!("{:8.4}", row.ms),
        tflops: format!("{:7.0}", row.tflops),
        speedup: row.speedup.map(times),
        speedup_bf16: row.speedup_bf16.map(times),
        note: note(row),
    };
    rows.into_iter().map(line).collect()
}

fn key(row: &Row) -> (&'static str, Masking, Pass) {
    (row.workload, row.mask, row.pass)
}

pub(crate) fn times(speedup: f64) -> String {
    format!("{speedup:.2}x")
}

fn note(row: &Row) -> Option<String> {
    let launched = (row.graph == Some(false)).then_some("no graph");
    let notes = [launched, Some(row.note.as_str())];
    let notes: Vec<_> = notes
        .into_iter()
        .flatten()
        .filter(|n| !n.is_empty())
        .collect();
    (!notes.is_empty()).then(|| notes.join(", "))
}

fn choice(row: &Row) -> Option<(&str, &'static str)> {
    Some((row.backward.as_deref()?, row.backward_reason?))
}

/// Which form our backward passes ran on which workloads, and why; nothing where none did.
pub fn form(rows: &[Row]) -> Option<String> {
    let mut forms: Vec<_> = rows.iter().filter_map(choice).collect();
    forms.sort_unstable();
    forms.dedup();
    let mut told = Vec::new();
    for (form, reason) in forms {
        let mut workloads: Vec<_> = rows
            .iter()
            .filter(|row| choice(row) == Some((form, reason)))
            .map(|row| row.workload)
            .collect();
        workloads.dedup();
        told.push(format!("{form} on {}: {reason}", workloads.join(", ")));
    }
    (!told.is_empty()).then(|| format!("our backward passes:\n- {}", told.join("\n- ")))
}

/// How one of our calls compares over all workloads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mean {
    /// `packed rows` or `batches`.
    workloads: &'static str,
    mask: Masking,
    pass: Pass,
    quantisation: Option<Quantisation>,
    /// Over whom.
    over: &'static str,
    #[serde(rename = "geometric mean")]
    mean: String,
    least: String,
    faster: String,
}

/// Geometric means of the rows of `system`, over the fastest peer and over the fastest BF16 peer, for
/// each mask, pass and quantisation, on the paper's packed rows and on the other batches.
pub fn means(rows: &[Row], system: &str) -> Vec<Mean> {
    let rows: Vec<_> = rows.iter().filter(|row| row.system == system).collect();
    let call = |row: &Row| {
        let workloads = match Shape::is_packed_row(row.workload) {
            true => "packed rows",
            false => "batches",
        };
        (workloads, row.mask, row.pass, row.quantisation)
    };
    let mut calls: Vec<_> = Vec::new();
    for row in &rows {
        if !calls.contains(&call(row)) {
            calls.push(call(row));
        }
    }
    type Over = (&'static str, fn(&Row) -> Option<f64>);
    let overs: [Over; 2] = [
        ("fastest peer", |row| row.speedup),
        ("fastest BF16 peer", |row| row.speedup_bf16),
    ];
    let mean = |key, (over, speedup): Over| {
        let (workloads, mask, pass, quantisation) = key;
        let of_call = rows.iter().filter(|row| call(row) == key);
        let speedups: Vec<_> = of_call.filter_map(|row| speedup(row)).collect();
        let least = speedups.iter().copied().min_by(f64::total_cmp)?;
        let faster = speedups.iter().filter(|speedup| **speedup > 1.0).count();
        Some(Mean {
            workloads,
            mask,
            pass,
            quantisation,
            over,
            mean: times(geometric(&speedups)),
            least: times(least),
            faster: format!("{faster} of {}", speedups.len()),
        })
    };
    let means = calls
        .iter()
        .flat_map(|&call| overs.map(|over| mean(call, over)));
    means.flatten().collect()
}

pub(crate) fn geometric(values: &[f64]) -> f64 {
    let logarithms: f64 = values.iter().map(|value| value.ln()).sum();
    (logarithms / values.len() as f64).exp()
}

/// What a call occupies beside what its layouts have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryLine {
    workload: &'static str,
    mask: Masking,
    pass: Pass,
    quantisation: Option<Quantisation>,
    system: String,
    #[serde(rename = "extra MiB")]
    peak: String,
    #[serde(rename = "layouts' MiB")]
    layouts: Option<String>,
    ratio: Option<String>,
}

/// One line for each row whose memory is known.
pub fn memory(rows: &[Row]) -> Vec<MemoryLine> {
    let mib = |bytes: u64| format!("{:9.2}", bytes as f64 / f64::from(1 << 20));
    let line = |row: &Row| {
        let peak = row.memory_bytes?;
        Some(MemoryLine {
            workload: row.workload,
            mask: row.mask,
            pass: row.pass,
            quantisation: row.quantisation,
            system: row.system.clone(),
            peak: mib(peak),
            layouts: row.layout_bytes.map(mib),
            ratio: row
                .layout_bytes
                .map(|layouts| format!("{:.3}", peak as f64 / layouts as f64)),
        })
    };
    rows.iter().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row::Memory;
    use super::super::row::compared;
    use super::super::row::tests::{measured, measured_in_two_kernels, setting};
    use super::*;

    #[test]
    fn calls_stay_together_with_the_fastest_first() {
        let mut own = measured("4x4096", Pass::Fwd, "flamia", 0.25);
        own.graph = Some(false);
        own.note = "a note".to_owned();
        let rows = compared(
            &[
                measured("4x4096", Pass::Fwd, "FA2", 0.5),
                measured("4x4096", Pass::Bwd, "FA2", 2.0),
                own,
                measured("16x1024", Pass::Fwd, "FA2", 0.125),
            ],
            &setting(),
        );
        let lines = lines(&rows);
        let told: Vec<_> = lines
            .iter()
            .map(|line| {
                (
                    line.workload,
                    line.pass,
                    line.system.as_str(),
                    line.ms.trim(),
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                ("4x4096", Pass::Fwd, "flamia", "0.2500"),
                ("4x4096", Pass::Fwd, "FA2", "0.5000"),
                ("4x4096", Pass::Bwd, "FA2", "2.0000"),
                ("16x1024", Pass::Fwd, "FA2", "0.1250"),
            ]
        );
        assert_eq!(lines[0].speedup.as_deref(), Some("2.00x"));
        assert_eq!(lines[0].note.as_deref(), Some("no graph, a note"));
        assert_eq!(lines[0].tflops.trim(), "1100");
        assert_eq!(lines[1].note, None);
    }

    #[test]
    fn the_form_of_the_backward_pass_is_told_with_its_reason() {
        let peers = [measured("4x4096", Pass::Bwd, "FA2", 0.5)];
        assert_eq!(form(&compared(&peers, &setting())), None);
        let ours = [
            measured("4x4096", Pass::Bwd, "flamia", 0.25),
            measured("4x4096", Pass::Train, "flamia", 0.5),
            measured_in_two_kernels("8192+224x256", Pass::Train, 0.5),
            measured("logu11-16k-gqa4", Pass::Train, "flamia", 0.5),
            measured("1x16384", Pass::Train, "flamia", 0.5),
        ];
        let rows = compared(&ours, &setting());
        let told = form(&rows).unwrap();
        let told: Vec<_> = told.lines().collect();
        assert_eq!(told.len(), 3);
        let one = "- one-kernel on 4x4096, logu11-16k-gqa4, 1x16384: documents have 280";
        assert!(told[1].starts_with(one));
        assert!(told[2].starts_with("- two-kernel on 8192+224x256: it was asked for"));
        assert_eq!(lines(&rows)[0].backward.as_deref(), Some("one-kernel"));
    }

    #[test]
    fn means_are_geometric_and_over_both_kinds_of_peers() {
        let rows = compared(
            &[
                measured("4x4096", Pass::Fwd, "flamia", 1.0),
                measured("4x4096", Pass::Fwd, "FA3", 4.0),
                measured("4x4096", Pass::Fwd, "cuDNN fp8", 2.0),
                measured("16x1024", Pass::Fwd, "flamia", 1.0),
                measured("16x1024", Pass::Fwd, "FA3", 1.0),
                measured("64x1024", Pass::Bwd, "flamia", 1.0),
                measured("1x16384", Pass::Fwd, "flamia", 1.0),
                measured("1x16384", Pass::Fwd, "FA3", 0.5),
            ],
            &setting(),
        );
        let means = means(&rows, "flamia");
        assert_eq!(means.len(), 4);
        assert_eq!(means[2].workloads, "batches");
        let (mean, faster) = (means[2].mean.as_str(), means[2].faster.as_str());
        assert_eq!((mean, faster), ("0.50x", "0 of 1"));
        let packed = means.iter().filter(|m| m.workloads == "packed rows");
        let told: Vec<_> = packed
            .map(|m| (m.over, m.mean.as_str(), m.least.as_str(), m.faster.as_str()))
            .collect();
        assert_eq!(
            told,
            [
                ("fastest peer", "1.41x", "1.00x", "1 of 2"),
                ("fastest BF16 peer", "2.00x", "1.00x", "1 of 2"),
            ]
        );
    }

    #[test]
    fn memory_stands_beside_the_layouts() {
        let mut own = measured("4x4096", Pass::Fwd, "flamia", 1.0);
        own.memory = Some(Memory {
            peak: 11 << 20,
            layouts: Some(10 << 20),
        });
        let peer = measured("4x4096", Pass::Fwd, "FA2", 1.0);
        let lines = memory(&compared(&[own, peer], &setting()));
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].peak.trim(), "11.00");
        assert_eq!(lines[0].ratio.as_deref(), Some("1.100"));
    }
}
