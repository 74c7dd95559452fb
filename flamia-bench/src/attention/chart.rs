//! The drawing of rates: a panel for each mask and pass, a group of bars for each workload.

use super::row::{Quantisation, Row};
use crate::bars::{Bar, Bars};

/// The rates of all rows.
pub fn rates(rows: &[Row]) -> Bars {
    let bar = |row: &Row| Bar {
        panel: format!("{}, {}", row.mask, row.pass),
        group: row.workload,
        name: match row.quantisation {
            None => row.system.clone(),
            Some(Quantisation::In) => format!("{}, with quantisation", row.system),
            Some(Quantisation::Out) => format!("{}, kernel alone", row.system),
        },
        value: row.tflops,
    };
    let gpu = rows.first().map_or("", |row| row.gpu.as_str());
    Bars {
        title: format!("attention, TFLOP/s (higher is faster), {gpu}"),
        unit: "TFLOP/s",
        bars: rows.iter().map(bar).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::compared;
    use super::super::row::tests::{measured, setting};
    use super::super::row::{Pass, Quantisation};
    use super::*;

    #[test]
    fn every_row_is_a_bar_of_its_rate() {
        let mut alone = measured("4x4096", Pass::Fwd, "flamia", 0.25);
        alone.quantisation = Some(Quantisation::Out);
        let rows = compared(
            &[
                measured("4x4096", Pass::Fwd, "flamia", 0.25),
                alone,
                measured("8192+224x256", Pass::Bwd, "FA2", 0.5),
            ],
            &setting(),
        );
        let rates = rates(&rows);
        assert!(rates.title.contains("NVIDIA H200"));
        let told: Vec<_> = rates
            .bars
            .iter()
            .map(|bar| (bar.panel.as_str(), bar.group, bar.name.as_str()))
            .collect();
        assert_eq!(
            told,
            [
                ("causal, fwd", "4x4096", "flamia, with quantisation"),
                ("causal, fwd", "4x4096", "flamia, kernel alone"),
                ("causal, bwd", "8192+224x256", "FA2"),
            ]
        );
        assert_eq!(rates.bars[2].value, rows[2].tflops);
    }
}
