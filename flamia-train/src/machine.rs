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
