//! Which settings a resumed run may change: those that leave every number of a step as it was.

use std::collections::BTreeMap;
use std::fmt;

use sha2::{Digest, Sha256};
use toml::{Table, Value};

use crate::checkpoint::hex;

/// Settings that may differ from the saved run's. `steps` is among them, so that a finished run can
/// be given more; the learning rate then follows the new, longer cosine. Another number of threads
/// or another device is the user's to choose, but sums come out in another order there. Data and
/// tokenizer may have moved: their contents are checked instead of their paths.
const FREE: [&str; 20] = [
    "data",
    "tokenizer",
    "out",
    "resume",
    "device",
    "threads",
    "steps",
    "compute.peak_tflops",
    "eval.every",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.best",
    "guard.skip_limit",
    "guard.spike_window",
    "guard.spike_factor",
    "guard.spike_reports",
    "log.every",
    "distributed.lost_after",
    "distributed.patience",
    "distributed.bucket_mib",
];

/// A setting that has another value than in a saved run.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Its key, as in a settings file.
    pub key: String,
    /// What the run was started with.
    pub saved: Option<Value>,
    /// What it is to be.
    pub now: Option<Value>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: &Option<Value>| match value {
            Some(value) => value.to_string(),
            None => "unset".into(),
        };
        write!(
            f,
            "{} was {} and is now {}",
            self.key,
            show(&self.saved),
            show(&self.now)
        )
    }
}

/// The settings that must stay and do not, in the order of their keys.
pub fn changes(saved: &Table, now: &Table) -> Vec<Change> {
    let mut changes = differences(saved, now);
    changes.retain(|change| !FREE.contains(&change.key.as_str()));
    changes
}

/// All settings that differ, in the order of their keys.
pub fn differences(saved: &Table, now: &Table) -> Vec<Change> {
    let (mut saved, now) = (flat(saved), flat(now));
    let mut changes = Vec::new();
    for (key, now) in now {
        let before = saved.remove(&key);
        if before.as_ref() != Some(&now) {
            changes.push(Change {
                key,
                saved: before,
                now: Some(now),
            });
        }
    }
    changes.extend(saved.into_iter().map(|(key, before)| Change {
        key,
        saved: Some(before),
        now: None,
    }));
    changes.sort_by(|a, b| a.key.cmp(&b.key));
    changes
}

/// A hash of the settings that must stay.
pub fn fingerprint(settings: &Table) -> String {
    let lines: Vec<String> = fixed(settings)
        .iter()
        .map(|(key, value)| format!("{key} = {value}\n"))
        .collect();
    hex(&Sha256::digest(lines.concat()))
}

/// The settings that must stay, by dotted key.
fn fixed(settings: &Table) -> BTreeMap<String, Value> {
    let mut flat = flat(settings);
    flat.retain(|key, _| !FREE.contains(&key.as_str()));
    flat
}

fn flat(settings: &Table) -> BTreeMap<String, Value> {
    let mut flat = BTreeMap::new();
    flatten("", settings, &mut flat);
    flat
}

fn flatten(prefix: &str, table: &Table, flat: &mut BTreeMap<String, Value>) {
    for (key, value) in table {
        let key = format!("{prefix}{key}");
        match value {
            Value::Table(table) => flatten(&format!("{key}."), table, flat),
            value => {
                flat.insert(key, value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    const SAVED: &str = "seed = 1\nsteps = 10\nthreads = 2\n[optim]\nlr = 0.1\nclip = 1.0\n";

    #[test]
    fn what_alters_the_result_is_named_with_both_values() {
        let saved = table(SAVED);
        let now =
            table("seed = 2\nsteps = 20\nthreads = 1\nattention = \"x\"\n[optim]\nlr = 0.1\n");
        let shown: Vec<String> = changes(&saved, &now)
            .iter()
            .map(Change::to_string)
            .collect();
        let expected = [
            "attention was unset and is now \"x\"",
            "optim.clip was 1.0 and is now unset",
            "seed was 1 and is now 2",
        ];
        assert_eq!(shown, expected);
        assert_ne!(fingerprint(&saved), fingerprint(&now));
    }

    #[test]
    fn more_steps_and_other_threads_are_no_change() {
        let saved = table(SAVED);
        let now = table("seed = 1\nsteps = 99\n[optim]\nlr = 0.1\nclip = 1.0\n[log]\nevery = 7\n");
        assert_eq!(changes(&saved, &now), []);
        assert_eq!(fingerprint(&saved), fingerprint(&now));
    }

    #[test]
    fn every_free_key_is_a_setting() {
        let known: Vec<_> = crate::settings::keys().iter().map(|key| key.path).collect();
        for key in FREE {
            assert!(known.contains(&key), "{key}");
        }
    }
}
