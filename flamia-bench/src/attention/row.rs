//! What was measured, and how it compares.

use std::fmt;

use flamia_kernels::cuda::call::FormChoice;
use serde::Serialize;

use super::workload::Shape;

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Masking {
    /// Those of its document that do not come after it
    Causal,
    /// Those of its document
    Full,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// Output and log-sum-exp
    Fwd,
    /// Gradients of Q, K and V
    Bwd,
    /// One after the other, in one call
    Train,
}

/// Whether a low-bit call starts from BF16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantisation {
    /// Operands are quantised in the call.
    In,
    /// They were quantised before.
    Out,
}

/// What an attention computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    #[allow(missing_docs)]
    Bf16,
    /// With one scale a tensor.
    Fp8,
    /// With a scale a block.
    Mxfp8,
}

macro_rules! spelt {
    ($($type:ty { $($variant:ident => $name:literal),+ })+) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$variant => $name),+ })
            }
        }
    )+};
}

spelt! {
    Masking { Causal => "causal", Full => "full" }
    Pass { Fwd => "fwd", Bwd => "bwd", Train => "train" }
    Quantisation { In => "in", Out => "out" }
}

/// An attention that takes part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct System {
    /// Its name.
    pub name: String,
    /// What it computes with.
    pub precision: Precision,
    /// Whether it is the project's own.
    pub is_ours: bool,
}

/// One time, before it is compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    #[allow(missing_docs)]
    pub shape: Shape,
    #[allow(missing_docs)]
    pub mask: Masking,
    #[allow(missing_docs)]
    pub pass: Pass,
    #[allow(missing_docs)]
    pub system: System,
    /// Missing where nothing is quantised.
    pub quantisation: Option<Quantisation>,
    /// Milliseconds.
    pub ms: f64,
    /// Whether a CUDA graph was replayed, or calls were launched one by one. Missing if another
    /// program measured.
    pub graph: Option<bool>,
    /// Rounds of which this is the median. Missing if another program measured.
    pub rounds: Option<u32>,
    /// Bytes beyond operands and results that the call occupied at most, and those that the layouts
    /// of quantised operands and schedule have.
    pub memory: Option<Memory>,
    /// What kernels the backward pass is of, where that can be chosen.
    pub form: Option<FormChoice>,
    /// What else there is to know.
    pub note: String,
}

/// Bytes of a call beyond operands and results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// At most, by torch's allocator.
    pub peak: u64,
    /// By the layouts; missing for others' attention.
    pub layouts: Option<u64>,
}

/// Where and with what all was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that its driver supports.
    pub driver: String,
    /// torch's version.
    pub torch: String,
    /// The commit that was built, if it was in a git checkout.
    pub commit: Option<String>,
}

/// One line of the JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Name of the packed row or batch.
    pub workload: &'static str,
    /// `causal` or `full`.
    pub mask: Masking,
    /// Whose attention.
    pub system: String,
    /// `bf16`, `fp8` or `mxfp8`.
    pub precision: Precision,
    /// `fwd`, `bwd` or `train`.
    pub pass: Pass,
    /// `in` or `out` of the timed call; null where nothing is quantised.
    pub quantisation: Option<Quantisation>,
    /// Milliseconds.
    pub ms: f64,
    /// 10^12 operations a second, causal ones counted once.
    pub tflops: f64,
    /// Milliseconds of the fastest peer of any precision as a multiple of these.
    pub speedup: Option<f64>,
    /// Milliseconds of the fastest BF16 peer as a multiple of these.
    pub speedup_bf16: Option<f64>,
    /// Bytes beyond operands and results that the call occupied at most.
    pub memory_bytes: Option<u64>,
    /// Those that its layouts have.
    pub layout_bytes: Option<u64>,
    /// `two-kernel` or `one-kernel`, of our calls with a backward pass.
    pub backward: Option<String>,
    /// What decided that.
    pub backward_reason: Option<&'static str>,
    /// Whether a CUDA graph was replayed.
    pub graph: Option<bool>,
    /// Rounds of which this is the median.
    pub rounds: Option<u32>,
    /// What else there is to know.
    pub note: String,
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that its driver supports.
    pub driver: String,
    /// torch's version.
    pub torch: String,
    /// The commit that was built.
    pub commit: Option<String>,
}

/// Every measurement beside the fastest peer of the same workload, mask and pass.
pub fn compared(measurements: &[Measurement], setting: &Setting) -> Vec<Row> {
    let row = |m: &Measurement| {
        let rivals = measurements.iter().filter(|peer| {
            !peer.system.is_ours && (peer.shape, peer.mask, peer.pass) == (m.shape, m.mask, m.pass)
        });
        let speedup = |is_rival: fn(&Measurement) -> bool| {
            let times = rivals.clone().filter(|peer| is_rival(peer));
            let fastest = times.map(|peer| peer.ms).min_by(f64::total_cmp);
            fastest.map(|fastest| fastest / m.ms)
        };
        Row {
            workload: m.shape.name,
            mask: m.mask,
            system: m.system.name.clone(),
            precision: m.system.precision,
            pass: m.pass,
            quantisation: m.quantisation,
            ms: m.ms,
            tflops: m.shape.flops(m.mask, m.pass) / m.ms / 1e9,
            speedup: speedup(|_| true),
            speedup_bf16: speedup(|peer| peer.system.precision == Precision::Bf16),
            memory_bytes: m.memory.map(|memory| memory.peak),
            layout_bytes: m.memory.and_then(|memory| memory.layouts),
            backward: m.form.map(|choice| choice.form.to_string()),
            backward_reason: m.form.map(|choice| choice.reason),
            graph: m.graph,
            rounds: m.rounds,
            note: m.note.clone(),
            gpu: setting.gpu.clone(),
            driver: setting.driver.clone(),
            torch: setting.torch.clone(),
            commit: setting.commit.clone(),
        }
    };
    measurements.iter().map(row).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::attention::way::Way;
    use flamia_kernels::BackwardForm;

    pub fn system(name: &str) -> System {
        System {
            name: name.to_owned(),
            precision: match name {
                "flamia" => Precision::Mxfp8,
                _ if name.contains("fp8") => Precision::Fp8,
                _ => Precision::Bf16,
            },
            is_ours: system_is_ours(name),
        }
    }

    fn system_is_ours(name: &str) -> bool {
        name == "flamia"
    }

    pub fn measured(workload: &str, pass: Pass, name: &str, ms: f64) -> Measurement {
        let (system, shape, mask) = (
            system(name),
            Shape::named(workload).unwrap(),
            Masking::Causal,
        );
        Measurement {
            shape,
            mask,
            pass,
            quantisation: system.is_ours.then_some(Quantisation::In),
            system,
            ms,
            graph: Some(true),
            rounds: Some(15),
            memory: None,
            form: (system_is_ours(name) && pass != Pass::Fwd)
                .then(|| Way::default().form(&shape, mask)),
            note: String::new(),
        }
    }

    /// Ours in two backward kernels, which the rule picks for none of the workloads.
    pub fn measured_in_two_kernels(workload: &str, pass: Pass, ms: f64) -> Measurement {
        let ours = measured(workload, pass, "flamia", ms);
        let way = Way {
            backward: BackwardForm::TwoKernel,
            ..Way::default()
        };
        let form = Some(way.form(&ours.shape, ours.mask));
        Measurement { form, ..ours }
    }

    pub fn setting() -> Setting {
        Setting {
            gpu: "NVIDIA H200".to_owned(),
            driver: "13.0".to_owned(),
            torch: "2.11.0".to_owned(),
            commit: Some("0123abcd".to_owned()),
        }
    }

    #[test]
    fn speedups_are_over_the_fastest_peer_of_the_same_pass() {
        let mut full = measured("4x4096", Pass::Fwd, "FA3", 0.1);
        full.mask = Masking::Full;
        let rows = compared(
            &[
                measured("4x4096", Pass::Fwd, "flamia", 0.25),
                measured("4x4096", Pass::Fwd, "FA2", 0.75),
                measured("4x4096", Pass::Fwd, "FA3", 0.5),
                measured("4x4096", Pass::Fwd, "cuDNN fp8", 0.375),
                measured("4x4096", Pass::Bwd, "flamia", 0.25),
                measured("16x1024", Pass::Fwd, "FA3", 0.1),
                full,
                measured_in_two_kernels("8192+224x256", Pass::Bwd, 0.5),
            ],
            &setting(),
        );
        assert_eq!(rows[0].speedup, Some(1.5));
        assert_eq!(rows[0].speedup_bf16, Some(2.0));
        assert_eq!(rows[1].speedup_bf16, Some(0.5 / 0.75));
        assert_eq!(rows[3].speedup, Some(1.0));
        assert_eq!(rows[4].speedup, None, "nobody else has a backward");
        let forms = [0, 1, 4, 7].map(|i: usize| rows[i].backward.as_deref());
        assert_eq!(forms, [None, None, Some("one-kernel"), Some("two-kernel")]);
        assert_ne!(rows[4].backward_reason, rows[7].backward_reason);
        // 4 * 16 * 128 * 4 * 4096^2 / 2 operations in a quarter of a millisecond.
        assert!((rows[0].tflops - 1_099.511_627_776).abs() < 1e-6);
    }

    #[test]
    fn rows_are_flat_and_have_the_documented_keys() {
        let mut own = measured("4x4096", Pass::Fwd, "flamia", 0.25);
        own.memory = Some(Memory {
            peak: 110,
            layouts: Some(100),
        });
        let row = serde_json::to_value(&compared(&[own], &setting())[0]).unwrap();
        let row = row.as_object().unwrap();
        let expected = [
            ("workload", "4x4096".into()),
            ("mask", "causal".into()),
            ("system", "flamia".into()),
            ("precision", "mxfp8".into()),
            ("pass", "fwd".into()),
            ("quantisation", "in".into()),
            ("ms", 0.25.into()),
            ("tflops", 1_099.511_627_776.into()),
            ("speedup", serde_json::Value::Null),
            ("speedup_bf16", serde_json::Value::Null),
            ("memory_bytes", 110.into()),
            ("layout_bytes", 100.into()),
            ("backward", serde_json::Value::Null),
            ("backward_reason", serde_json::Value::Null),
            ("graph", true.into()),
            ("rounds", 15.into()),
            ("note", "".into()),
            ("gpu", "NVIDIA H200".into()),
            ("driver", "13.0".into()),
            ("torch", "2.11.0".into()),
            ("commit", "0123abcd".into()),
        ];
        let found: Vec<_> = row
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone()))
            .collect();
        assert_eq!(found, expected);
    }
}
