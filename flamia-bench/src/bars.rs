//! Grouped bars: a panel for each kind of call, in it a group for each workload.

use std::io;
use std::ops::Range;
use std::path::Path;

use flamia_train::atomic::atomic_write;
use flamia_train::plot::PlotError;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

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
/// Air beyond the longest bars.
const MARGIN: f64 = 1.08;

/// Told apart also by colour-blind readers; those of the first two are alike.
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

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// Caption of its panel.
    pub panel: String,
    /// Name of its group.
    pub group: &'static str,
    /// What the legend has for its colour.
    pub name: String,
    #[allow(missing_docs)]
    pub value: f64,
}

/// What is drawn. Panels, groups and names come in the order of their first appearance.
#[derive(Clone, Debug, PartialEq)]
pub struct Bars {
    /// Above everything.
    pub title: String,
    /// Beside the axis of every panel.
    pub unit: &'static str,
    #[allow(missing_docs)]
    pub bars: Vec<Bar>,
}

impl Bars {
    /// Draws them into the file `path`, as SVG.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn draw(&self, path: &Path) -> Result<(), PlotError> {
        let svg = self
            .render()
            .map_err(|error| PlotError::Draw(error.to_string()))?;
        Ok(atomic_write(path, svg.as_bytes())?)
    }

    fn render(&self) -> Result<String, Failure> {
        let names = distinct(self.bars.iter().map(|bar| bar.name.as_str()));
        let panels = distinct(self.bars.iter().map(|bar| bar.panel.as_str()));
        let legend = LEGEND * names.len().div_ceil(NAMES) as u32;
        let height = TITLE + legend + PANEL * panels.len().max(1) as u32;
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE)?;
        let (top, rest) = area.split_vertically(TITLE + legend);
        top.draw_text(&self.title, &(FONT, 20).into_text_style(&top), (16, 12))?;
        draw_legend(&top, &names)?;
        let areas = rest.split_evenly((panels.len().max(1), 1));
        for (area, panel) in areas.iter().zip(panels) {
            self.draw_panel(area, panel, &names)?;
        }
        area.present()?;
        drop((area, top, rest, areas));
        Ok(svg)
    }

    fn draw_panel(&self, area: &Area<'_>, panel: &str, names: &[&str]) -> Result<(), Failure> {
        let bars: Vec<_> = self.bars.iter().filter(|bar| bar.panel == panel).collect();
        let groups = distinct(bars.iter().map(|bar| bar.group));
        let mut chart = ChartBuilder::on(area)
            .caption(panel, (FONT, 16))
            .margin_left(8)
            .margin_right(16)
            .x_label_area_size(34)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..groups.len() as f64, extent(&bars))?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .y_desc(self.unit)
            .y_labels(6)
            .label_style((FONT, 13))
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(0xe4, 0xe4, 0xe4))
            .draw()?;
        // The colour of a name is the same in every panel; the place is not left empty where it is missing.
        let present: Vec<_> = names
            .iter()
            .enumerate()
            .filter(|(_, name)| bars.iter().any(|bar| bar.name == **name))
            .collect();
        let width = FILL / present.len().max(1) as f64;
        for bar in &bars {
            let group = groups.iter().position(|name| *name == bar.group);
            let place = present.iter().position(|(_, name)| bar.name == **name);
            let (Some(group), Some(place)) = (group, place) else {
                continue;
            };
            let left = group as f64 + (1.0 - FILL) / 2.0 + width * place as f64;
            let corners = [(left, 0.0), (left + width, bar.value)];
            let style = colour(present[place].0).filled();
            chart.draw_series([Rectangle::new(corners, style)])?;
        }
        let style = (FONT, 13)
            .into_text_style(area)
            .pos(Pos::new(HPos::Center, VPos::Top));
        let bottom = extent(&bars).start;
        for (group, name) in groups.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(group as f64 + 0.5, bottom));
            // Within the panel, which coordinates of the chart are not.
            let (left, top) = area.get_base_pixel();
            area.draw_text(name, &style, (x - left, y - top + 8))?;
        }
        Ok(())
    }
}

/// From zero to the longest bar, or from the longest one below it.
fn extent(bars: &[&Bar]) -> Range<f64> {
    let values = || bars.iter().map(|bar| bar.value);
    let most = values().fold(0.0, f64::max) * MARGIN;
    let least = values().fold(0.0, f64::min) * MARGIN;
    // Nothing at all has an axis too.
    least..if most > least { most } else { 1.0 }
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

fn draw_legend(area: &Area<'_>, names: &[&str]) -> Result<(), Failure> {
    let style = (FONT, 14).into_text_style(area);
    for (index, name) in names.iter().enumerate() {
        let x = 16 + (WIDTH / NAMES as u32) as i32 * (index % NAMES) as i32;
        let y = TITLE as i32 + LEGEND as i32 * (index / NAMES) as i32;
        let square = Rectangle::new([(x, y + 2), (x + 12, y + 14)], colour(index).filled());
        area.draw(&square)?;
        area.draw_text(name, &style, (x + 18, y + 1))?;
    }
    Ok(())
}

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(panel: &str, group: &'static str, name: &str, value: f64) -> Bar {
        Bar {
            panel: panel.to_owned(),
            group,
            name: name.to_owned(),
            value,
        }
    }

    fn drawn(bars: Vec<Bar>) -> String {
        let bars = Bars {
            title: "what was measured".to_owned(),
            unit: "per cent",
            bars,
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bars.svg");
        bars.draw(&path).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn every_value_is_a_bar_and_every_name_is_there() {
        let svg = drawn(vec![
            bar("first", "4x4096", "one", 1.0),
            bar("first", "4x4096", "other", 2.0),
            bar("first", "8192+224x256", "other", -2.0),
            bar("second", "4x4096", "other", 2.0),
        ]);
        let told = [
            "what was measured",
            "per cent",
            "first",
            "second",
            "one",
            "other",
            "8192+224x256",
        ];
        for text in told {
            assert!(svg.contains(text), "{text} in\n{svg}");
        }
        // Of each colour its bars, and a square of the legend.
        let filled = |colour: &str| svg.matches(&format!("fill=\"{colour}\"")).count();
        assert_eq!([filled("#C24D00"), filled("#F2A96D")], [2, 4]);
    }

    #[test]
    fn axes_begin_at_zero_or_below() {
        let bars = [1.0, 3.0, 2.0].map(|value| bar("", "", "", value));
        let rising: Vec<_> = bars.iter().collect();
        assert_eq!(extent(&rising), 0.0..3.0 * MARGIN);
        let falling = bar("", "", "", -1.0);
        assert_eq!(extent(&[&falling, &bars[0]]), -MARGIN..MARGIN);
        assert_eq!(extent(&[]), 0.0..1.0);
    }

    #[test]
    fn nothing_measured_is_an_empty_drawing() {
        assert!(drawn(Vec::new()).contains("what was measured"));
    }
}
