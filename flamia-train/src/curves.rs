//! The curves that a run's event files hold, over all its resumptions.

use std::collections::BTreeMap;
use std::path::Path;

use crate::tensorboard::{EventError, read_events};

/// The curve of training losses.
pub const TRAIN_LOSS: &str = "train/loss";
/// The curve of validation losses.
pub const VAL_LOSS: &str = "val/loss";
/// The curve of label tokens trained on.
pub const TOKENS: &str = "train/tokens";
/// The curve of label tokens trained on per second.
pub const SPEED: &str = "train/tokens_per_s";

/// Points as (step, value), in the order of steps, each step once.
pub type Curve = Vec<(f64, f64)>;

/// Every curve of the run in `folder`, by tag, up to `last_step`.
///
/// # Errors
/// [`EventError`] when the folder or an event file cannot be read.
pub fn read_curves(folder: &Path, last_step: u64) -> Result<BTreeMap<String, Curve>, EventError> {
    let read_error = |source| EventError::Read {
        path: folder.into(),
        source,
    };
    let mut scalars = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(read_error)? {
        let path = entry.map_err(read_error)?.path();
        if path.to_string_lossy().contains(".tfevents.") {
            scalars.extend(read_events(&path)?.scalars);
        }
    }
    // A step that was done again after a kill has a later point, which counts.
    scalars.sort_by(|a, b| a.wall_time.total_cmp(&b.wall_time));
    let mut curves: BTreeMap<String, BTreeMap<i64, f32>> = BTreeMap::new();
    for point in scalars {
        if point.step <= i64::try_from(last_step).unwrap_or(i64::MAX) {
            let curve = curves.entry(point.tag).or_default();
            curve.insert(point.step, point.value);
        }
    }
    let points = |curve: BTreeMap<i64, f32>| {
        let points = curve.into_iter();
        points
            .map(|(step, value)| (step as f64, value.into()))
            .collect()
    };
    Ok(curves
        .into_iter()
        .map(|(tag, curve)| (tag, points(curve)))
        .collect())
}
