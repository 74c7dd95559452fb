//! The relative errors of the exponentials.

use std::path::Path;

use flamia_kernels::cpu::exponential::{mitchell_p, polynomial, schraudolph};
use flamia_train::plot::{PlotError, Series, Style, loss_svg};

use super::Row;

/// An approximation of 2^x.
pub struct Curve {
    /// Its name.
    pub name: &'static str,
    /// 2^x, nearly.
    pub exp2: fn(f32) -> f32,
    figures: Figures,
}

/// What there is to say about the ratio to 2^x.
enum Figures {
    /// Its bounds and its mean, with those of the paper: it is off on purpose.
    Ratios([Option<f64>; 3]),
    /// How far from one it gets.
    Error,
}

/// Every approximation.
pub const EXPONENTIALS: [Curve; 6] = [
    Curve {
        name: "mitchell-p",
        exp2: mitchell_p,
        // "At most 4.7 %" either way; its highest is nearer.
        figures: Figures::Ratios([Some(0.953), None, None]),
    },
    Curve {
        name: "schraudolph",
        exp2: schraudolph,
        figures: Figures::Ratios([Some(0.961), Some(1.020), Some(1.0)]),
    },
    Curve {
        name: "polynomial 2",
        exp2: |x| polynomial(x, 2),
        figures: Figures::Error,
    },
    Curve {
        name: "polynomial 3",
        exp2: |x| polynomial(x, 3),
        figures: Figures::Error,
    },
    Curve {
        name: "polynomial 4",
        exp2: |x| polynomial(x, 4),
        figures: Figures::Error,
    },
    Curve {
        name: "polynomial 5",
        exp2: |x| polynomial(x, 5),
        figures: Figures::Error,
    },
];

/// Every 2^-14th of ten powers of two.
fn range() -> impl Iterator<Item = f32> {
    (-10 << 14..0).map(|i| i as f32 / 16384.0)
}

fn ratio(curve: &Curve, x: f32) -> f64 {
    f64::from((curve.exp2)(x)) / f64::from(x).exp2()
}

/// Bounds and mean of the ratio to 2^x, or the largest relative error.
pub fn errors(curve: &Curve) -> Vec<Row> {
    let (mut lowest, mut highest, mut sum, mut count) = (f64::MAX, f64::MIN, 0.0, 0.0);
    for x in range() {
        let ratio = ratio(curve, x);
        lowest = lowest.min(ratio);
        highest = highest.max(ratio);
        sum += ratio;
        count += 1.0;
    }
    let row = |metric, value, paper| Row {
        name: curve.name,
        inputs: "x from -10 to 0".into(),
        metric,
        value,
        paper,
    };
    match curve.figures {
        Figures::Ratios([low, high, mean]) => vec![
            row("lowest ratio to 2^x", lowest, low),
            row("highest ratio to 2^x", highest, high),
            row("mean ratio to 2^x", sum / count, mean),
        ],
        Figures::Error => {
            let error = (highest - 1.0).max(1.0 - lowest);
            vec![row("largest relative error", error, None)]
        }
    }
}

/// Draws the relative errors of the three coarsest over two powers of two.
///
/// # Errors
/// The plot cannot be drawn or written.
pub fn svg(path: &Path) -> Result<(), PlotError> {
    let series: Vec<Series> = EXPONENTIALS[..3]
        .iter()
        .map(|curve| Series {
            name: curve.name.into(),
            points: (-1000..=0)
                .map(|i| i as f32 / 500.0)
                .map(|x| (f64::from(x), 100.0 * (ratio(curve, x) - 1.0)))
                .collect(),
            style: Style::Thin,
        })
        .collect();
    let axes = ["x", "error of 2^x (%)"];
    loss_svg(path, "Approximations of 2^x", &series, axes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_the_paper() {
        let mut compared = 0;
        for row in EXPONENTIALS.iter().flat_map(errors) {
            println!("{} {} {:.5}", row.name, row.metric, row.value);
            if let Some(paper) = row.paper {
                assert!((row.value - paper).abs() < 5e-3, "{row:?}");
                compared += 1;
            }
        }
        assert_eq!(compared, 4);
    }

    #[test]
    fn a_higher_degree_is_closer() {
        let degrees = EXPONENTIALS[2..].iter().flat_map(errors);
        let values: Vec<f64> = degrees.map(|row| row.value).collect();
        assert_eq!(values.len(), 4);
        assert!(values.is_sorted_by(|a, b| *a > 5.0 * b), "{values:?}");
        assert!(values[0] < 2e-3);
    }

    #[test]
    fn the_plot_names_its_curves() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("errors.svg");
        svg(&path).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        for name in ["mitchell-p", "schraudolph", "polynomial 2"] {
            assert!(svg.contains(name), "{name}");
        }
    }
}
