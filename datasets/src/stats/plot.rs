//! The statistics as an SVG file: lengths on the left, padding on the right.

use std::io;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use super::Stats;
use crate::atomic;
use crate::pack::Packing;

const SIZE: (u32, u32) = (1200, 480);
const FONT: &str = "sans-serif";
/// Told apart also by colour-blind readers.
const HUES: [(Packing, RGBColor); 2] = [
    (Packing::Concat, RGBColor(0xc2, 0x4d, 0x00)),
    (Packing::BestFit, RGBColor(0x00, 0x5b, 0x96)),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Why a plot could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// It could not be drawn.
    #[error("cannot draw the plot: {0}")]
    Draw(String),
    /// It could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

/// Draws the statistics into the file `path`.
///
/// # Errors
/// [`PlotError`].
pub fn plot(path: &Path, stats: &Stats) -> Result<(), PlotError> {
    let mut svg = String::new();
    draw(&mut svg, stats).map_err(|error| PlotError::Draw(error.to_string()))?;
    atomic::write(path, svg.as_bytes()).map_err(|source| PlotError::Write {
        path: path.into(),
        source,
    })
}

fn draw(svg: &mut String, stats: &Stats) -> Drawn {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(SIZE.0 / 2);
    lengths(&left, stats)?;
    padding(&right, stats)?;
    area.present()
}

/// A power of two as people write it.
fn tokens(exponent: &f64) -> String {
    let tokens = exponent.exp2().round();
    if tokens >= 1024.0 {
        format!("{}k", tokens / 1024.0)
    } else {
        tokens.to_string()
    }
}

fn lengths(area: &Area<'_>, stats: &Stats) -> Drawn {
    let histogram = &stats.lengths.histogram;
    let highest = histogram.iter().copied().max().unwrap_or(1) as f64;
    let documents = stats.lengths.documents.max(1) as f64;
    let percent = |count: f64| 100.0 * count / documents;
    let end = (histogram.len() as f64 / 2.0).max(1.0);
    let mut chart = ChartBuilder::on(area)
        .caption("Document lengths", (FONT, 22))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..end, 0.0..1.05 * percent(highest))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(end as usize + 1)
        .x_label_formatter(&tokens)
        .x_desc("tokens")
        .y_desc("% of documents")
        .label_style((FONT, 14))
        .draw()?;
    let bars = histogram.iter().enumerate().map(|(bucket, &count)| {
        let start = bucket as f64 / 2.0;
        let corners = [(start, 0.0), (start + 0.5, percent(count as f64))];
        let mut bar = Rectangle::new(corners, HUES[1].1.filled());
        bar.set_margin(0, 0, 1, 1);
        bar
    });
    chart.draw_series(bars)?;
    Ok(())
}

fn padding(area: &Area<'_>, stats: &Stats) -> Drawn {
    let percent = |packed: &super::Packed| 100.0 * packed.report.padding_share();
    let exponents = || stats.packed.iter().map(|p| (p.row_tokens as f64).log2());
    let start = exponents().fold(f64::INFINITY, f64::min).min(30.0);
    let end = exponents().fold(start + 1.0, f64::max);
    let highest = stats.packed.iter().map(percent).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption("Padding", (FONT, 22))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(start..end, 0.0..1.05 * highest)?;
    chart
        .configure_mesh()
        .x_labels((end - start) as usize + 1)
        .x_label_formatter(&tokens)
        .x_desc("row tokens")
        .y_desc("% of positions")
        .label_style((FONT, 14))
        .draw()?;
    for (packing, hue) in HUES {
        let of_packing = stats.packed.iter().filter(|p| p.packing == packing);
        let points: Vec<(f64, f64)> = of_packing
            .map(|p| ((p.row_tokens as f64).log2(), percent(p)))
            .collect();
        chart
            .draw_series(LineSeries::new(points.clone(), hue.stroke_width(2)))?
            .label(packing.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], hue.stroke_width(2)));
        chart.draw_series(
            points
                .into_iter()
                .map(|at| Circle::new(at, 3, hue.filled())),
        )?;
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.filled())
        .border_style(BLACK)
        .label_font((FONT, 14))
        .draw()?;
    Ok(())
}
