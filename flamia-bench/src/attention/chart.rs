//! The drawing of rates: a panel for each mask and pass, a group of bars for each workload.

use std::io;
use std::path::Path;

use flamia_train::atomic::atomic_write;
use flamia_train::plot::PlotError;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::row::{Masking, Pass, Quantisation, Row};

const FONT: &str = "sans-serif";
const WIDTH: u32 = 1280;
/// Height of the strip with the title.
const TITLE: u32 = 40;
/// Height of a line of the legend.
const LEGEND: u32 = 20;
/// Names in a line of it.
const NAMES: usize = 4;
/// Height of a panel.
const PANEL: u32 = 260;
/// Of a group's width, what its bars take.
const FILL: f64 = 0.86;

/// Told apart also by colour-blind readers; those of the first two are ours.
const COLOURS: [RGBColor; 10] = [
    RGBColor(0xc2, 0x4d, 0x00),
    RGBColor(0xf2, 0xa9, 0x6d),
    RGBColor(0x00, 0x5b, 0x96),
    RGBColor(0x6f, 0xa8, 0xd6),
    RGBColor(0x00, 0x7a, 0x5e),
    RGBColor(0x7c, 0xc7, 0xb0),
    RGBColor(0x9a, 0x3b, 0x7a),
    RGBColor(0xdd, 0xa8, 0xc8),
    RGBColor(0x4d, 0x4d, 0x4d),
    RGBColor(0xb0, 0xb0, 0xb0),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Failure = DrawingAreaErrorKind<io::Error>;

/// Draws the rates into the file `path`.
///
/// # Errors
/// A file that cannot be written.
pub fn draw(path: &Path, rows: &[Row]) -> Result<(), PlotError> {
    let svg = render(rows).map_err(|error| PlotError::Draw(error.to_string()))?;
    Ok(atomic_write(path, svg.as_bytes())?)
}

/// Who has bars of one colour.
type Contender = (String, Option<Quantisation>);

fn contender(row: &Row) -> Contender {
    (row.system.clone(), row.quantisation)
}

/// The values in the order of their first appearance.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut seen, value| {
        if !seen.contains(&value) {
            seen.push(value);
        }
        seen
    })
}

fn render(rows: &[Row]) -> Result<String, Failure> {
    let contenders = distinct(rows.iter().map(contender));
    let panels = distinct(rows.iter().map(|row| (row.mask, row.pass)));
    let legend = LEGEND * contenders.len().div_ceil(NAMES) as u32;
    let height = TITLE + legend + PANEL * panels.len().max(1) as u32;
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
    area.fill(&WHITE)?;
    let (top, rest) = area.split_vertically(TITLE + legend);
    let gpu = rows.first().map_or("", |row| row.gpu.as_str());
    let title = format!("attention, TFLOP/s (higher is faster), {gpu}");
    top.draw_text(&title, &(FONT, 20).into_text_style(&top), (16, 12))?;
    draw_legend(&top, &contenders)?;
    for (panel, (mask, pass)) in rest
        .split_evenly((panels.len().max(1), 1))
        .iter()
        .zip(panels)
    {
        draw_panel(panel, rows, &contenders, mask, pass)?;
    }
    area.present()?;
    drop((area, top, rest));
    Ok(svg)
}

fn draw_legend(area: &Area<'_>, contenders: &[Contender]) -> Result<(), Failure> {
    let style = (FONT, 14).into_text_style(area);
    for (index, (system, quantisation)) in contenders.iter().enumerate() {
        let x = 16 + (WIDTH / NAMES as u32) as i32 * (index % NAMES) as i32;
        let y = TITLE as i32 + LEGEND as i32 * (index / NAMES) as i32;
        let square = Rectangle::new([(x, y + 2), (x + 12, y + 14)], colour(index).filled());
        area.draw(&square)?;
        let name = match quantisation {
            None => system.clone(),
            Some(Quantisation::In) => format!("{system}, with quantisation"),
            Some(Quantisation::Out) => format!("{system}, kernel alone"),
        };
        area.draw_text(&name, &style, (x + 18, y + 1))?;
    }
    Ok(())
}

fn draw_panel(
    area: &Area<'_>,
    rows: &[Row],
    contenders: &[Contender],
    mask: Masking,
    pass: Pass,
) -> Result<(), Failure> {
    let rows: Vec<_> = rows
        .iter()
        .filter(|row| (row.mask, row.pass) == (mask, pass))
        .collect();
    let workloads = distinct(rows.iter().map(|row| row.workload));
    let most = rows.iter().map(|row| row.tflops).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{mask}, {pass}"), (FONT, 16))
        .margin_left(8)
        .margin_right(16)
        .x_label_area_size(34)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..workloads.len() as f64, 0.0..most * 1.08)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .y_desc("TFLOP/s")
        .y_labels(6)
        .label_style((FONT, 13))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xe4, 0xe4, 0xe4))
        .draw()?;
    let present: Vec<_> = contenders
        .iter()
        .enumerate()
        .filter(|(_, one)| rows.iter().any(|row| contender(row) == **one))
        .collect();
    let width = FILL / present.len().max(1) as f64;
    for row in &rows {
        let group = workloads.iter().position(|name| *name == row.workload);
        let bar = present.iter().position(|(_, one)| **one == contender(row));
        let (Some(group), Some(bar)) = (group, bar) else {
            continue;
        };
        let left = group as f64 + (1.0 - FILL) / 2.0 + width * bar as f64;
        let corners = [(left, 0.0), (left + width, row.tflops)];
        let style = colour(present[bar].0).filled();
        chart.draw_series([Rectangle::new(corners, style)])?;
    }
    let style = (FONT, 13)
        .into_text_style(area)
        .pos(Pos::new(HPos::Center, VPos::Top));
    for (group, name) in workloads.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(group as f64 + 0.5, 0.0));
        // Within the panel, which coordinates of the chart are not.
        let (left, top) = area.get_base_pixel();
        area.draw_text(name, &style, (x - left, y - top + 8))?;
    }
    Ok(())
}

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

#[cfg(test)]
mod tests {
    use super::super::row::compared;
    use super::super::row::tests::{measured, setting};
    use super::*;

    #[test]
    fn every_rate_is_a_bar_and_every_name_is_there() {
        let rows = compared(
            &[
                measured("4x4096", Pass::Fwd, "flamia", 0.25),
                measured("4x4096", Pass::Fwd, "FA2", 0.5),
                measured("8192+224x256", Pass::Fwd, "FA2", 0.5),
                measured("4x4096", Pass::Bwd, "FA2", 2.0),
            ],
            &setting(),
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates.svg");
        draw(&path, &rows).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        for text in [
            "flamia, with quantisation",
            "FA2",
            "8192+224x256",
            "causal, fwd",
            "causal, bwd",
            "NVIDIA H200",
        ] {
            assert!(svg.contains(text), "{text} in\n{svg}");
        }
        // Of each colour its bars, and a square of the legend.
        let filled = |colour: &str| svg.matches(&format!("fill=\"{colour}\"")).count();
        assert_eq!([filled("#C24D00"), filled("#F2A96D")], [2, 4]);
    }

    #[test]
    fn nothing_measured_is_an_empty_drawing() {
        assert!(render(&[]).unwrap().contains("TFLOP/s"));
    }
}
