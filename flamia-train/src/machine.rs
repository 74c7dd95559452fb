//! What results were measured on.

/// The CPU's name as the system gives it, else its architecture.
#[must_use]
pub fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let name = model.map(|rest| rest.trim_start_matches([' ', '\t', ':']));
    name.unwrap_or(std::env::consts::ARCH).to_string()
}

/// The dense BF16 rate of the GPU called `name`, in TFLOP/s, as its maker states it.
#[must_use]
pub fn bf16_tflops(name: &str) -> Option<f64> {
    // The first that fits counts: PCIe and NVL variants stand before what they are variants of.
    const KNOWN: [(&str, f64); 11] = [
        ("H100 PCIe", 756.0),
        ("H100 NVL", 835.0),
        ("H100", 989.0),
        ("H200 NVL", 835.0),
        ("H200", 989.0),
        ("GH200", 989.0),
        ("B200", 2250.0),
        ("A100", 312.0),
        ("L40S", 362.0),
        ("A10", 125.0),
        ("RTX 4090", 165.0),
    ];
    let fits = |known: &str| {
        name.split(known)
            .nth(1)
            .is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    };
    KNOWN
        .iter()
        .find(|(known, _)| fits(known))
        .map(|(_, tflops)| *tflops)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_known_by_the_names_that_drivers_give() {
        for (name, tflops) in [
            ("NVIDIA H200", Some(989.0)),
            ("NVIDIA H100 80GB HBM3", Some(989.0)),
            ("NVIDIA H100 PCIe", Some(756.0)),
            ("NVIDIA A100-SXM4-80GB", Some(312.0)),
            ("NVIDIA A10", Some(125.0)),
            ("NVIDIA A10G", None),
            ("NVIDIA GeForce GT 710", None),
        ] {
            assert_eq!(bf16_tflops(name), tflops, "{name}");
        }
    }
}
