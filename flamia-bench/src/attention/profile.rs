//! How Nsight Compute is asked about one kernel.

use clap::ValueEnum;

use super::Attention;
use super::workload::shapes;

/// The command line that profiles the launches of `kernel` in a run of one workload, one mask and one
/// pass: the first of each that was asked for.
pub fn command(kernel: &str, settings: &Attention) -> String {
    let workload = settings
        .workload
        .first()
        .cloned()
        .or_else(|| shapes().next().map(|shape| shape.name.to_owned()))
        .unwrap_or_default();
    let first = |flag: &str, value: Option<String>| {
        value.map_or_else(String::new, |value| format!(" {flag} {value}"))
    };
    let mask = settings.mask.first().map(ToString::to_string);
    let pass = settings.pass.first().map(ToString::to_string);
    let system = settings
        .system
        .first()
        .and_then(ValueEnum::to_possible_value);
    let system = system.map(|value| value.get_name().to_owned());
    format!(
        "ncu --clock-control none --target-processes all --set full -k 'regex:{kernel}' -s 2 -c 1 \
         cargo xtask bench --workload {workload}{}{}{} --rounds 1 --gpu {}",
        first("--mask", mask),
        first("--pass", pass),
        first("--system", system),
        settings.gpu
    )
}
