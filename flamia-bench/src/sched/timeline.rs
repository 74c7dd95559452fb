//! The drawing of who does what when.

use std::io;
use std::path::Path;

use flamia_sched::simulate::{Span, Timeline};
use flamia_train::atomic::atomic_write;
use flamia_train::plot::PlotError;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::SchedError;
use super::simulate::{Outcome, Simulate};

const FONT: &str = "sans-serif";
const WIDTH: u32 = 1000;
/// Height of the strip that holds the title.
const TITLE: u32 = 44;
/// Height of the strip that holds a policy's name.
const NAME: u32 = 26;
/// Of the space for the axis of time below the last policy.
const AXIS: u32 = 52;
/// Of the spaces beside the lanes.
const SIDES: [u32; 2] = [60, 24];
/// Of the part of it that stays white.
const MARGIN: u32 = 8;
/// From the cheapest to the costliest items; the lightness falls evenly.
const SHADES: [RGBColor; 6] = [
    RGBColor(0xcf, 0xe1, 0xf2),
    RGBColor(0x9d, 0xc4, 0xe3),
    RGBColor(0x64, 0xa3, 0xd1),
    RGBColor(0x35, 0x80, 0xb9),
    RGBColor(0x10, 0x5b, 0x98),
    RGBColor(0x08, 0x33, 0x5f),
];
const BOUND: RGBColor = RGBColor(0xc2, 0x4d, 0x00);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Draws the timelines of every policy on one axis of time into the file `path`, a lane for each
/// CTA, darker where an item takes longer.
///
/// # Errors
/// More than one row of documents or number of SMs; a file that cannot be written.
pub fn draw(path: &Path, simulate: &Simulate) -> Result<(), SchedError> {
    let (title, outcomes) = simulate.only()?;
    let svg = render(&title, simulate.unit(), &outcomes)
        .map_err(|error| PlotError::Draw(error.to_string()))?;
    Ok(atomic_write(path, svg.as_bytes())?)
}

fn render(
    title: &str,
    unit: &str,
    outcomes: &[Outcome],
) -> Result<String, DrawingAreaErrorKind<io::Error>> {
    let ends = outcomes.iter().map(|outcome| outcome.timeline.makespan());
    // An empty schedule has an axis too.
    let end = Some(ends.fold(0.0, f64::max))
        .filter(|&end| end > 0.0)
        .unwrap_or(1.0);
    let lanes = |outcome: &Outcome| {
        let lanes = outcome.timeline.lanes().len() as u32;
        lanes * (264 / lanes).clamp(2, 16)
    };
    let height = outcomes
        .iter()
        .map(|outcome| NAME + lanes(outcome))
        .sum::<u32>();
    let mut svg = String::new();
    let area =
        SVGBackend::with_string(&mut svg, (WIDTH, TITLE + height + AXIS)).into_drawing_area();
    area.fill(&WHITE)?;
    let (top, mut rest) = area.split_vertically(TITLE);
    let legend = "darker: longer item; dashed: bound";
    top.draw_text(
        title,
        &(FONT, 20).into_text_style(&top),
        (SIDES[0] as i32, 12),
    )?;
    let right = (FONT, 14).into_text_style(&top).pos(text_right());
    top.draw_text(legend, &right, ((WIDTH - SIDES[1]) as i32, 16))?;
    for (index, outcome) in outcomes.iter().enumerate() {
        let last = index + 1 == outcomes.len();
        let axis = if last { AXIS } else { 0 };
        let (panel, below) = rest.split_vertically(NAME + lanes(outcome) + axis);
        draw_panel(&panel, outcome, end, last.then_some(unit))?;
        rest = below;
    }
    area.present()?;
    drop((area, top, rest));
    Ok(svg)
}

/// One policy. The axis of time is drawn where its unit is given.
fn draw_panel(area: &Area<'_>, outcome: &Outcome, end: f64, unit: Option<&str>) -> Drawn {
    let timeline = &outcome.timeline;
    let lanes = timeline.lanes().len();
    let (name, area) = area.split_vertically(NAME);
    let text = format!(
        "{}: makespan {}, {:.3} × bound, idle {:.1} %",
        outcome.policy.name(),
        shown(timeline.makespan()),
        timeline.ratio(),
        100.0 * timeline.idle_share()
    );
    let text_style = (FONT, 15).into_text_style(&name);
    name.draw_text(&text, &text_style, (SIDES[0] as i32, 6))?;
    let mut chart = ChartBuilder::on(&area)
        .margin_left(MARGIN)
        .margin_right(SIDES[1])
        .y_label_area_size(SIDES[0] - MARGIN)
        .x_label_area_size(if unit.is_some() { AXIS } else { 0 })
        // The first CTA on top.
        .build_cartesian_2d(0.0..end, lanes as f64..0.0)?;
    let mut mesh = chart.configure_mesh();
    mesh.disable_mesh()
        .y_desc("CTA")
        .y_labels(3)
        .y_label_formatter(&|cta| format!("{cta:.0}"))
        .label_style((FONT, 13))
        .axis_desc_style((FONT, 14));
    let axis;
    if let Some(unit) = unit {
        axis = format!("time ({unit})");
        mesh.x_desc(&axis).x_label_formatter(&|time| shown(*time));
    } else {
        mesh.x_labels(0);
    }
    mesh.draw()?;
    // What is too narrow to be told apart is drawn together.
    let pixel = end / f64::from(WIDTH - SIDES[0] - SIDES[1]);
    for (lane, spans) in timeline.lanes().iter().enumerate() {
        chart.draw_series(bars(spans, timeline, 4.0 * pixel).into_iter().map(|bar| {
            let corners = [(bar.start, lane as f64), (bar.end, lane as f64 + 1.0)];
            let mut rectangle = Rectangle::new(corners, SHADES[bar.shade].filled());
            if bar.end - bar.start >= 4.0 * pixel {
                rectangle.set_margin(0, 0, 0, 1);
            }
            rectangle
        }))?;
    }
    let bound = timeline.bound();
    let line = [(bound, 0.0), (bound, lanes as f64)];
    chart.draw_series(DashedLineSeries::new(line, 6, 4, BOUND.stroke_width(2)))?;
    Ok(())
}

/// A time to the hundredth, which is more than anybody sees.
fn shown(time: f64) -> String {
    ((time * 100.0).round() / 100.0).to_string()
}

/// A run of items of one shade.
#[derive(Debug, PartialEq)]
struct Bar {
    start: f64,
    end: f64,
    shade: usize,
}

/// The bars of a lane: items, those shorter than `narrow` joined to neighbours of their shade.
fn bars(spans: &[Span], timeline: &Timeline, narrow: f64) -> Vec<Bar> {
    let mut bars: Vec<Bar> = Vec::new();
    for span in spans {
        let duration = span.end - span.start;
        let share = duration / timeline.longest();
        let shade = ((share * SHADES.len() as f64).ceil() as usize).clamp(1, SHADES.len()) - 1;
        match bars.last_mut() {
            Some(bar) if bar.shade == shade && bar.end == span.start && duration < narrow => {
                bar.end = span.end;
            }
            _ => bars.push(Bar {
                start: span.start,
                end: span.end,
                shade,
            }),
        }
    }
    bars
}

fn text_right() -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(HPos::Right, VPos::Top)
}

#[cfg(test)]
mod tests {
    use super::super::tests::parsed;
    use super::*;

    fn drawn(line: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("timeline.svg");
        draw(&path, &parsed(line)).unwrap();
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_drawing_holds_a_title_every_policy_and_every_wide_item() {
        // Items of 2, 4, 6 and 8 blocks, so a makespan of 10, which is the bound, longest first.
        let line = "--distribution fixed:1024 --heads 1 --sms 2 --policy";
        let svg = drawn(&format!("{line} longest-dynamic,input-strided"));
        for text in [
            "fixed:1024, causal forward, 1 heads, 2 SMs",
            "longest-dynamic: makespan 10, 1.000 × bound, idle 0.0 %",
            // 2 + 6 against 4 + 8.
            "input-strided: makespan 12, 1.200 × bound, idle 16.7 %",
            "time (blocks)",
        ] {
            assert!(svg.contains(text), "{text}");
        }
        // Quarters of the longest item are of the second, third, fifth and sixth shade of six.
        let items =
            SHADES.map(|RGBColor(r, g, b)| svg.matches(&format!("#{r:02X}{g:02X}{b:02X}")).count());
        assert_eq!(items, [0, 2, 2, 0, 2, 2]);
        assert!(svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn odd_schedules_are_drawn_too() {
        for line in [
            "--distribution equal:1 --total 0 --sms 3",
            "--distribution equal:7 --total 7 --sms 1",
            "--distribution equal:512 --total 2048 --sms 4000",
            "--distribution equal:512 --total 2048 --sms 3 --per-block-us 0",
        ] {
            let svg = drawn(&format!("{line} --policy longest-dynamic"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{line}");
        }
    }

    #[test]
    fn items_too_narrow_to_see_are_joined() {
        let one = parsed(
            "--distribution equal:256 --total 1024 --heads 1 --sms 1 --policy longest-dynamic",
        );
        let (_, outcomes) = one.only().unwrap();
        let timeline = &outcomes[0].timeline;
        let lane = &timeline.lanes()[0];
        assert_eq!(bars(lane, timeline, 0.0).len(), 4);
        let joined = Bar {
            start: 0.0,
            end: 8.0,
            shade: SHADES.len() - 1,
        };
        assert_eq!(bars(lane, timeline, 3.0), [joined]);
    }

    #[test]
    fn one_row_and_one_gpu_are_drawn() {
        let error = parsed("--workload 4x4096,64x1024").only().err().unwrap();
        let text = error.to_string();
        assert!(text.contains("2 rows on 2 numbers of SMs"), "{text}");
    }
}
