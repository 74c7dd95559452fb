//! How results are held against the CPU's.

use std::sync::Mutex;

use super::Problem;

/// Collects what goes wrong, so that one run on a GPU tells all of it.
#[derive(Default)]
pub struct Failures(Mutex<Vec<String>>);

impl Failures {
    pub fn check<T>(&self, case: &str, result: Result<T, String>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                println!("FAILED {case}: {error}");
                self.0.lock().unwrap().push(format!("{case}: {error}"));
                None
            }
        }
    }

    pub fn assert(&self, case: &str, holds: bool, otherwise: impl FnOnce() -> String) {
        self.check(case, if holds { Ok(()) } else { Err(otherwise()) });
    }
}

impl Drop for Failures {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let failures = self.0.lock().unwrap();
            assert!(
                failures.is_empty(),
                "{}\n  {}",
                failures.len(),
                failures.join("\n  ")
            );
        }
    }
}

/// Of the entries that are finite on both sides.
pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let finite = || {
        a.iter()
            .zip(b)
            .filter(|(a, b)| a.is_finite() && b.is_finite())
    };
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in finite() {
        ab += a * b;
        aa += a * a;
        bb += b * b;
    }
    if aa == 0.0 && bb == 0.0 {
        1.0
    } else {
        ab / (aa * bb).sqrt()
    }
}

/// Whether only one of two numbers is NaN, or infinite.
pub fn differs_in_kind(a: f64, b: f64) -> bool {
    a.is_nan() != b.is_nan() || (a.is_infinite() || b.is_infinite()) && !a.is_nan() && a != b
}

/// How far a `[tokens, heads, head_dim]` result is from the CPU's.
pub struct Distance {
    pub cosine: f64,
    /// The largest difference, relative to the largest magnitude.
    pub worst: f64,
    /// Entries that differ by more than a unit of BF16 and what the order of sums gives.
    pub moved: usize,
    pub entries: usize,
    worst_place: String,
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "cosine 1 - {:.1e}, worst {:.1e} of the largest at {}, {} of {} moved",
            1.0 - self.cosine,
            self.worst,
            self.worst_place,
            self.moved,
            self.entries
        )
    }
}

/// An error if NaN or infinity are not where the CPU has them.
pub fn distance(
    problem: &Problem,
    name: &str,
    heads: usize,
    found: &[f64],
    cpu: &[f64],
) -> Result<Distance, String> {
    let dims = problem.shape.head_dim.get();
    let place = |i: usize| {
        let (token, head) = (i / dims / heads, i / dims % heads);
        let document = problem
            .documents
            .iter()
            .position(|rows| rows.contains(&token));
        format!(
            "row {token} (document {document:?}), head {head}, dim {}",
            i % dims
        )
    };
    let pairs = || found.iter().copied().zip(cpu.iter().copied()).enumerate();
    if let Some((i, (a, b))) = pairs().find(|(_, (a, b))| differs_in_kind(*a, *b)) {
        return Err(format!("{name} is {a}, expected {b} at {}", place(i)));
    }
    let finite = cpu.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-30, |m: f64, x| m.max(x.abs()));
    let error = |a: f64, b: f64| if a.is_nan() { 0.0 } else { (a - b).abs() };
    let (at, worst) = pairs()
        .map(|(i, (a, b))| (i, error(a, b)))
        .fold((0, 0.0), |m, x| if x.1 > m.1 { x } else { m });
    let moved = pairs()
        .filter(|(_, (a, b))| error(*a, *b) > b.abs() / 128.0 + 1e-4 * scale)
        .count();
    Ok(Distance {
        cosine: cosine(found, cpu),
        worst: worst / scale,
        moved,
        entries: found.len(),
        worst_place: place(at),
    })
}
