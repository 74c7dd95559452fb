//! What a training call occupies on a long row.

use serde::Serialize;

use super::row::{Precision, Setting};
use super::workload::Shape;

/// The packed row that memory is told of: 131,072 rows, as in the paper's section 4.1.
pub const LONG: Shape = Shape::batch("32x4096", &[4096; 32]);

/// Bytes that torch's allocator had handed out and not got back, beyond what it had before Q, K and V were
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupied {
    /// Q, K and V.
    pub operands: u64,
    /// dO, dQ, dK and dV.
    pub gradients: u64,
    /// At most while the forward pass was given to the GPU, Q, K, V and O among it.
    pub forward: u64,
    /// Between the passes: O, and what else the backward pass reads; Q, K and V only if it reads them.
    pub held: u64,
    /// At most while the backward pass was given to the GPU: what is held, dO, the gradients, and what it
    /// needs for itself.
    pub backward: u64,
}

/// One system's call, and a line of the JSON of `--memory`. All sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryRow {
    /// Name of the packed row.
    pub workload: &'static str,
    /// Rows of it.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Whose attention.
    pub system: String,
    /// `bf16` or `mxfp8`.
    pub precision: Precision,
    /// Q, K and V.
    pub operand_bytes: u64,
    /// What is kept from the forward pass for the backward pass, O among it, and Q, K and V where they are
    /// read again.
    pub held_bytes: u64,
    /// At most in the forward pass, Q, K, V and O among it.
    pub forward_peak_bytes: u64,
    /// At most in the backward pass: what is held, dO, dQ, dK, dV, and `backward_extra_bytes`.
    pub backward_peak_bytes: u64,
    /// What the backward pass needs for itself.
    pub backward_extra_bytes: u64,
    /// At most in the whole call.
    pub peak_bytes: u64,
    /// `held_bytes` as a share of the first BF16 peer's.
    pub held_over_bf16: Option<f64>,
    /// `peak_bytes` as a share of the first BF16 peer's.
    pub peak_over_bf16: Option<f64>,
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that its driver supports.
    pub driver: String,
    /// torch's version.
    pub torch: String,
    /// The commit that was built.
    pub commit: Option<String>,
}

/// A system, what it computes with, and what its call occupied.
pub type Measured = (String, Precision, Occupied);

/// Every call beside the first BF16 one.
pub fn rows(measured: &[Measured], setting: &Setting) -> Vec<MemoryRow> {
    let peak = |occupied: &Occupied| occupied.forward.max(occupied.backward);
    let bf16 = measured
        .iter()
        .find(|(_, precision, _)| *precision == Precision::Bf16)
        .map(|(_, _, occupied)| occupied);
    let over = |size: &dyn Fn(&Occupied) -> u64, own: &Occupied| {
        bf16.map(|peer| size(own) as f64 / size(peer) as f64)
    };
    let row = |(system, precision, own): &Measured| MemoryRow {
        workload: LONG.name,
        rows: LONG.lengths.iter().sum(),
        heads: LONG.heads,
        head_dim: LONG.head_dim,
        system: system.clone(),
        precision: *precision,
        operand_bytes: own.operands,
        held_bytes: own.held,
        forward_peak_bytes: own.forward,
        backward_peak_bytes: own.backward,
        backward_extra_bytes: own.backward.saturating_sub(own.held + own.gradients),
        peak_bytes: peak(own),
        held_over_bf16: over(&|occupied| occupied.held, own),
        peak_over_bf16: over(&peak, own),
        gpu: setting.gpu.clone(),
        driver: setting.driver.clone(),
        torch: setting.torch.clone(),
        commit: setting.commit.clone(),
    };
    measured.iter().map(row).collect()
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    system: String,
    #[serde(rename = "held between the passes, MiB")]
    held: String,
    #[serde(rename = "of BF16's")]
    held_share: Option<String>,
    #[serde(rename = "forward, at most")]
    forward: String,
    #[serde(rename = "backward, for itself")]
    extra: String,
    #[serde(rename = "call, at most")]
    peak: String,
    #[serde(rename = "of BF16's call")]
    peak_share: Option<String>,
}

/// The rows as people read them.
pub fn lines(rows: &[MemoryRow]) -> Vec<Line> {
    let mib = |bytes: u64| format!("{:8.1}", bytes as f64 / f64::from(1 << 20));
    let share = |share: Option<f64>| share.map(|share| format!("{share:.2}"));
    let line = |row: &MemoryRow| Line {
        system: row.system.clone(),
        held: mib(row.held_bytes),
        held_share: share(row.held_over_bf16),
        forward: mib(row.forward_peak_bytes),
        extra: mib(row.backward_extra_bytes),
        peak: mib(row.peak_bytes),
        peak_share: share(row.peak_over_bf16),
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row::tests::setting;
    use super::*;

    #[test]
    fn the_long_row_is_the_paper_s() {
        assert_eq!(LONG.documents().total(), 131_072);
    }

    #[test]
    fn calls_stand_beside_the_first_bf16_one() {
        let occupied = |held: u64, forward: u64, backward: u64| Occupied {
            operands: 30 << 20,
            gradients: 40 << 20,
            forward: forward << 20,
            held: held << 20,
            backward: backward << 20,
        };
        let measured = |system: &str, precision, occupied| (system.to_owned(), precision, occupied);
        let rows = rows(
            &[
                measured("flamia", Precision::Mxfp8, occupied(25, 70, 90)),
                measured("FA2", Precision::Bf16, occupied(50, 55, 120)),
                measured("cuDNN", Precision::Bf16, occupied(50, 150, 100)),
            ],
            &setting(),
        );
        assert_eq!(rows[0].held_over_bf16, Some(0.5));
        assert_eq!(rows[0].peak_over_bf16, Some(0.75));
        let extra = rows.iter().map(|row| row.backward_extra_bytes >> 20);
        assert_eq!(extra.collect::<Vec<_>>(), [25, 30, 10]);
        assert_eq!(rows[2].peak_bytes, 150 << 20);
        let lines = lines(&rows);
        assert_eq!(lines[0].held.trim(), "25.0");
        assert_eq!(lines[2].peak_share.as_deref(), Some("1.25"));

        let alone = super::rows(
            &[measured("flamia", Precision::Mxfp8, occupied(25, 70, 90))],
            &setting(),
        );
        assert_eq!(alone[0].peak_over_bf16, None);
    }

    #[test]
    fn rows_have_the_documented_keys() {
        let occupied = Occupied {
            operands: 1,
            gradients: 1,
            forward: 1,
            held: 1,
            backward: 2,
        };
        let rows = rows(&[("FA2".to_owned(), Precision::Bf16, occupied)], &setting());
        let row = serde_json::to_value(&rows[0]).unwrap();
        let keys: Vec<_> = row.as_object().unwrap().keys().cloned().collect();
        let expected = [
            "workload",
            "rows",
            "heads",
            "head_dim",
            "system",
            "precision",
            "operand_bytes",
            "held_bytes",
            "forward_peak_bytes",
            "backward_peak_bytes",
            "backward_extra_bytes",
            "peak_bytes",
            "held_over_bf16",
            "peak_over_bf16",
            "gpu",
            "driver",
            "torch",
            "commit",
        ];
        assert_eq!(keys, expected);
    }
}
