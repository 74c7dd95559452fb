//! The loss curves of a run as an SVG file.

use std::path::Path;

use plotters::prelude::*;

use crate::atomic::{WriteError, atomic_write};

const SIZE: (u32, u32) = (960, 540);
const FONT: &str = "sans-serif";
/// A line has at most this many corners; each is then the mean of as many points as needed.
const MAX_POINTS: usize = 1500;
/// One hue a series of each style, dark for [`Style::Bold`] and light for [`Style::Thin`]; told
/// apart also by colour-blind readers.
const HUES: [(RGBColor, RGBColor); 6] = [
    (RGBColor(0x00, 0x5b, 0x96), RGBColor(0x7f, 0xb3, 0xd9)),
    (RGBColor(0xc2, 0x4d, 0x00), RGBColor(0xf2, 0xb0, 0x85)),
    (RGBColor(0x00, 0x7a, 0x5e), RGBColor(0x85, 0xcc, 0xb8)),
    (RGBColor(0x9a, 0x3b, 0x7a), RGBColor(0xdd, 0xa8, 0xc8)),
    (RGBColor(0x8a, 0x6d, 0x00), RGBColor(0xd9, 0xc6, 0x6f)),
    (RGBColor(0x4d, 0x4d, 0x4d), RGBColor(0xb0, 0xb0, 0xb0)),
];

/// Why a plot could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The curves could not be drawn.
    #[error("cannot draw the plot: {0}")]
    Draw(String),
    /// The file could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// How a curve looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A thin light line, for a noisy curve of many points.
    Thin,
    /// A bold dark line through marked points.
    Bold,
    /// A dark line, for a curve that stands alone.
    Line,
}

/// One curve.
#[derive(Debug, Clone)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points; those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
    /// Its looks.
    pub style: Style,
}

/// Draws `series` over one another and writes the plot to `path`. `axes` are the labels of x and
/// y, such as `["step", "loss (nats/byte)"]`.
///
/// # Errors
/// [`PlotError::Write`] if the file cannot be written; [`PlotError::Draw`] if plotters fails.
pub fn loss_svg(
    path: &Path,
    title: &str,
    series: &[Series],
    axes: [&str; 2],
) -> Result<(), PlotError> {
    Ok(atomic_write(path, chart(title, series, axes)?.as_bytes())?)
}

/// [`loss_svg`] as text.
///
/// # Errors
/// [`PlotError::Draw`] if plotters fails.
pub fn chart(title: &str, series: &[Series], axes: [&str; 2]) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw(&mut svg, title, series, axes).map_err(|error| PlotError::Draw(error.to_string()))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    title: &str,
    series: &[Series],
    [x_label, y_label]: [&str; 2],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let curves: Vec<_> = series.iter().map(|curve| thinned(&curve.points)).collect();
    let (x_range, y_range) = ranges(&curves);

    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, (FONT, 22))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(x_range, y_range)?;
    chart
        .configure_mesh()
        .x_desc(x_label)
        .y_desc(y_label)
        .x_label_formatter(&|x| {
            if x.fract() == 0.0 {
                format!("{x:.0}")
            } else {
                format!("{x:.2}")
            }
        })
        .axis_desc_style((FONT, 17))
        .label_style((FONT, 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xe4, 0xe4, 0xe4))
        .draw()?;

    let mut drawn = [0; 3];
    for (curve, points) in series.iter().zip(curves) {
        let nth = &mut drawn[curve.style as usize];
        let (dark, light) = HUES[*nth % HUES.len()];
        *nth += 1;
        let line = match curve.style {
            Style::Thin => light.stroke_width(1),
            Style::Bold => dark.stroke_width(3),
            Style::Line => dark.stroke_width(2),
        };
        if curve.style == Style::Bold {
            chart.draw_series(points.iter().map(|&at| Circle::new(at, 4, dark.filled())))?;
        }
        chart
            .draw_series(LineSeries::new(points, line))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], line));
    }
    if !series.is_empty() {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .legend_area_size(32)
            .margin(12)
            .label_font((FONT, 16))
            .background_style(WHITE)
            .border_style(RGBColor(0xc8, 0xc8, 0xc8))
            .draw()?;
    }
    area.present()
}

/// The finite points, many of them averaged in runs of equal length.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let finite = points
        .iter()
        .filter(|(x, y)| x.is_finite() && y.is_finite());
    let finite: Vec<_> = finite.copied().collect();
    let run = finite.len().div_ceil(MAX_POINTS).max(1);
    let mean = |run: &[(f64, f64)]| {
        let (x, y) = run
            .iter()
            .fold((0.0, 0.0), |sum, at| (sum.0 + at.0, sum.1 + at.1));
        (x / run.len() as f64, y / run.len() as f64)
    };
    finite.chunks(run).map(mean).collect()
}

/// The ranges of both axes: what the points span, with a margin, and never of length zero.
fn ranges(curves: &[Vec<(f64, f64)>]) -> (std::ops::Range<f64>, std::ops::Range<f64>) {
    let span = |of: fn(&(f64, f64)) -> f64| {
        let values = || curves.iter().flatten().map(of);
        let (low, high) = (
            values().fold(f64::MAX, f64::min),
            values().fold(f64::MIN, f64::max),
        );
        if low > high { (0.0, 1.0) } else { (low, high) }
    };
    let (left, right) = span(|at| at.0);
    let (low, high) = span(|at| at.1);
    let margin = if high > low { 0.05 * (high - low) } else { 0.5 };
    (
        left..if right > left { right } else { left + 1.0 },
        low - margin..high + margin,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(series: &[Series]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        loss_svg(&path, "a < b & c", series, ["step", "loss (nats/byte)"]).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    fn series(style: Style, points: impl IntoIterator<Item = (f64, f64)>) -> Series {
        let name = format!("{style:?} curve");
        Series {
            name,
            points: points.into_iter().collect(),
            style,
        }
    }

    #[test]
    fn a_plot_holds_title_axes_legend_and_every_validation_point() {
        let train = series(
            Style::Thin,
            (0..300).map(|i| (f64::from(i), 5.6 - f64::from(i) / 100.0)),
        );
        let validation = series(Style::Bold, (0..7).map(|i| (f64::from(i) * 50.0, 5.0)));
        let svg = plot(&[train, validation]);
        for text in [
            "a &lt; b &amp; c",
            "step",
            "loss (nats/byte)",
            "Thin curve",
            "Bold curve",
        ] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert_eq!(svg.matches("<circle").count(), 7);
    }

    #[test]
    fn odd_curves_are_drawn_too() {
        let odd = [
            vec![],
            vec![(3.0, 2.0)],
            vec![(0.0, f64::NAN), (1.0, f64::INFINITY), (2.0, 1.0)],
            vec![(0.0, 1.0), (0.0, 1.0)],
        ];
        plot(&[]);
        for points in odd {
            let finite = points.iter().filter(|at| at.1.is_finite()).count();
            let svg = plot(&[series(Style::Bold, points)]);
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
            assert_eq!(svg.matches("<circle").count(), finite);
        }
    }

    #[test]
    fn long_curves_are_thinned_to_means() {
        let points: Vec<_> = (0..4500)
            .map(|i| (f64::from(i), f64::from(i % 3)))
            .collect();
        let thin = thinned(&points);
        assert_eq!(thin.len(), MAX_POINTS);
        assert_eq!(thin[0], (1.0, 1.0));
        assert!(thin.iter().all(|at| at.1 == 1.0));
        assert_eq!(thinned(&points[..1500]), points[..1500]);
    }
}
