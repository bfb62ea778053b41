//! Figures as SVG, drawn by plotters.
//!
//! The colours are names: the page's style sheet replaces each of them for a light and a dark
//! screen, and fills the simulated parts with a hatch. So no colour below is ever seen.

use plotters::coord::combinators::BindKeyPoints;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::element::ErrorBar;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::spread::Spread;

/// Whose figure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A document's own.
    Document,
    /// QEMU or the kernel without platen, here.
    Other,
    /// platen, here.
    Platen,
    /// platen on a simulated device, here.
    Simulated,
    /// Computed from measured figures.
    Computed,
}

impl Kind {
    /// All, in the order of the page's legend.
    pub(crate) const ALL: [Self; 5] =
        [Self::Document, Self::Other, Self::Platen, Self::Simulated, Self::Computed];

    /// Its name on the page.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Document => "the document",
            Self::Other => "QEMU, Linux",
            Self::Platen => "platen",
            Self::Simulated => "SIMULATED",
            Self::Computed => "computed",
        }
    }

    /// The class of its rows, and the last digit of its colour's name.
    pub(crate) fn class(self) -> &'static str {
        match self {
            Self::Document => "document",
            Self::Other => "other",
            Self::Platen => "platen",
            Self::Simulated => "simulated",
            Self::Computed => "computed",
        }
    }

    pub(crate) fn colour(self) -> RGBColor {
        let number = match self {
            Self::Document => 1,
            Self::Other => 2,
            Self::Platen => 3,
            Self::Simulated => 4,
            Self::Computed => 5,
        };
        RGBColor(0xA0, 0xB0, number)
    }
}

/// The names of the colours of text, of grid lines, and of the first line of a line figure.
pub(crate) const INK: RGBColor = RGBColor(0xA0, 0xB0, 0x10);
pub(crate) const GRID: RGBColor = RGBColor(0xA0, 0xB0, 0x11);
const LINES: u8 = 0x20;
/// Lines of a figure at most: they have colours of their own.
const MOST_LINES: usize = 8;
/// Bars of a figure at most.
const MOST_BARS: usize = 48;

const WIDTH: u32 = 500;
pub(crate) const TEXT: i32 = 15;
const BAR: u32 = 27;
/// Units of a bar on its axis.
const ROW: i32 = 100;

/// A drawn figure.
#[derive(Debug)]
pub(crate) struct Figure {
    pub(crate) caption: String,
    /// One `svg` element.
    pub(crate) svg: String,
    /// The lines' names, for a legend in the page, with whether each is simulated.
    pub(crate) legend: Vec<(String, bool)>,
}

/// One bar.
#[derive(Debug)]
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) spread: Spread,
    pub(crate) kind: Kind,
}

impl Bar {
    pub(crate) fn new(label: impl Into<String>, kind: Kind, spread: Spread) -> Self {
        Self { label: label.into(), spread, kind }
    }
}

/// One line.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) simulated: bool,
    pub(crate) points: Vec<(f64, Spread)>,
}

/// The axes of a line figure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axes<'a> {
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    /// Each step to the right is a doubling, and these are the marks.
    pub(crate) doubling: bool,
}

/// Whether an axis that ends at this value can have marks. Plotters finds marks by repeated
/// addition; it does not end where a step is lost in rounding, or is infinite.
fn can_have_marks(end: f64) -> bool {
    (1e-9..=1e15).contains(&end)
}

/// Horizontal bars from 0 on, with their medians as text and their ranges as whiskers; `None`
/// without a bar, or if a value is negative, or if all are too small or one too large to be drawn.
pub(crate) fn bars(caption: &str, unit: &str, digits: usize, bars: &[Bar]) -> Option<Figure> {
    let bars = &bars[..bars.len().min(MOST_BARS)];
    let most = bars.iter().map(|bar| bar.spread.most).fold(0.0, f64::max);
    if !can_have_marks(most) || !bars.iter().all(|bar| bar.spread.least >= 0.0) {
        return None;
    }
    let count = u32::try_from(bars.len()).ok()?;
    let svg = draw(count * BAR + 52, |root| draw_bars(root, unit, digits, bars, most))?;
    Some(Figure { caption: caption.into(), svg: labelled(&svg, caption), legend: Vec::new() })
}

pub(crate) type Drawn = Result<(), Box<dyn std::error::Error>>;
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// A drawing of the page's width.
pub(crate) fn draw(height: u32, paint: impl FnOnce(&Area<'_>) -> Drawn) -> Option<String> {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
    let drawn = paint(&root).is_ok() && root.present().is_ok();
    drop(root);
    drawn.then_some(svg)
}

fn draw_bars(root: &Area<'_>, unit: &str, digits: usize, bars: &[Bar], most: f64) -> Drawn {
    let count = i32::try_from(bars.len())?;
    // The first bar is the topmost.
    let middle = |nth: i32| (count - nth) * ROW - ROW / 2;
    let longest = bars.iter().map(|bar| bar.label.chars().count()).max().unwrap_or(0);
    let labels = (u32::try_from(longest)?.min(100) * 7 + 16).clamp(60, 236);
    let keys = (0..count).map(middle).collect::<Vec<_>>();
    let mut chart = ChartBuilder::on(root)
        .margin(2)
        .margin_right(10)
        .x_label_area_size(44)
        .y_label_area_size(labels)
        .build_cartesian_2d(0.0..most * 1.32, (0..count * ROW).with_key_points(keys))?;
    let name = |at: &i32| {
        let bar = usize::try_from(count - at / ROW - 1).ok().and_then(|nth| bars.get(nth));
        bar.map_or(String::new(), |bar| shortened(&bar.label))
    };
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_labels(6)
        .y_labels(bars.len())
        .x_desc(unit)
        .x_label_formatter(&|value| plain(*value))
        .y_label_formatter(&name)
        .label_style(("sans-serif", TEXT).into_font().color(&INK))
        .draw()?;
    for (nth, bar) in (0..).zip(bars) {
        let (at, spread) = (middle(nth), bar.spread);
        let corners = [(0.0, at - ROW / 3), (spread.median, at + ROW / 3)];
        chart.draw_series([Rectangle::new(corners, bar.kind.colour().filled())])?;
        if spread.runs > 1 {
            let whisker = ErrorBar::new_horizontal(
                at,
                spread.least,
                spread.median,
                spread.most,
                INK.stroke_width(1),
                7,
            );
            chart.draw_series([whisker])?;
        }
        let place = Pos::new(HPos::Left, VPos::Center);
        let style = ("sans-serif", TEXT).into_font().color(&INK).pos(place);
        let value = EmptyElement::at((spread.most.max(spread.median), at))
            + Text::new(crate::spread::grouped(spread.median, digits), (6, 0), style);
        chart.draw_series([value])?;
    }
    Ok(())
}

/// Lines with their points and ranges; `None` without a point, or with `doubling` and a value on
/// the x axis below 1, or with values that are too small or too large to be drawn.
pub(crate) fn lines(caption: &str, axes: Axes<'_>, lines: &[Line]) -> Option<Figure> {
    let lines = &lines[..lines.len().min(MOST_LINES)];
    let points = || lines.iter().flat_map(|line| line.points.iter());
    let least_x = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let most_x = points().map(|point| point.0).fold(f64::NEG_INFINITY, f64::max);
    let most_y = points().map(|point| point.1.most).fold(0.0, f64::max);
    let has_x = !points().any(|point| point.0.is_nan() || point.0.abs() > 1e15);
    let has_y = can_have_marks(most_y) && points().all(|point| point.1.least >= 0.0);
    if !least_x.is_finite() || !has_x || !has_y || (axes.doubling && least_x < 1.0) {
        return None;
    }
    let svg = draw(300, |root| match axes.doubling {
        true => {
            let end = if most_x > least_x { most_x } else { least_x * 2.0 };
            let mut keys = vec![least_x];
            while keys.len() < 20 && keys[keys.len() - 1] * 2.0 <= end {
                keys.push(keys[keys.len() - 1] * 2.0);
            }
            let range = (least_x / 1.15..end * 1.15).log_scale().base(2.0).with_key_points(keys);
            draw_lines(root, axes, lines, range, most_y)
        }
        false => {
            let room = ((most_x - least_x) * 0.03).max(least_x.abs() * 0.01).max(1e-9);
            let range = (least_x - room).max(least_x.min(0.0))..most_x + room;
            draw_lines(root, axes, lines, range, most_y)
        }
    })?;
    let legend = lines.iter().map(|line| (line.label.clone(), line.simulated)).collect();
    Some(Figure { caption: caption.into(), svg: labelled(&svg, caption), legend })
}

fn draw_lines<X>(root: &Area<'_>, axes: Axes<'_>, lines: &[Line], x: X, most_y: f64) -> Drawn
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
{
    let mut chart = ChartBuilder::on(root)
        .margin(4)
        .margin_right(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x, 0.0..most_y * 1.08)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_labels(8)
        .y_labels(6)
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_label_formatter(&|value| plain(*value))
        .y_label_formatter(&|value| plain(*value))
        .label_style(("sans-serif", TEXT).into_font().color(&INK))
        .draw()?;
    for (nth, line) in (LINES..).zip(lines) {
        let colour = RGBColor(0xA0, 0xB0, nth);
        let path = line.points.iter().map(|(x, spread)| (*x, spread.median));
        let style = colour.stroke_width(2);
        match line.simulated {
            true => {
                chart.draw_series(DashedLineSeries::new(path, 7, 5, style))?;
            }
            false => {
                chart.draw_series(LineSeries::new(path, style))?;
            }
        }
        let ranges = line.points.iter().filter(|(_, spread)| spread.most > spread.least);
        chart.draw_series(ranges.map(|(x, spread)| {
            let Spread { least, median, most, .. } = *spread;
            ErrorBar::new_vertical(*x, least, median, most, colour.stroke_width(1), 6)
        }))?;
        if line.points.len() <= 24 {
            chart.draw_series(
                line.points
                    .iter()
                    .map(|(x, spread)| Circle::new((*x, spread.median), 3, colour.filled())),
            )?;
        }
    }
    Ok(())
}

/// A label that fits beside its bar.
fn shortened(label: &str) -> String {
    const FITS: usize = 32;
    match label.chars().nth(FITS) {
        None => label.to_owned(),
        Some(_) => label.chars().take(FITS - 1).chain(['…']).collect(),
    }
}

/// A number of an axis.
pub(crate) fn plain(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        size if size < 0.1 => 3,
        size if size < 1.0 => 2,
        size if size < 10.0 && (value * 10.0).fract().abs() > 1e-6 => 2,
        size if size < 100.0 && value.fract().abs() > 1e-6 => 1,
        _ => 0,
    };
    crate::spread::grouped(value, digits)
}

/// The drawing as an element of a page: named, of the page's width, and without the attributes that
/// only a file of its own needs.
pub(crate) fn labelled(svg: &str, caption: &str) -> String {
    let view = svg.split_once("viewBox=\"").and_then(|(_, rest)| rest.split_once('"'));
    let (view, rest) = view.unwrap_or(("0 0 1 1", svg));
    let inner = rest.split_once('>').map_or("", |(_, inner)| inner);
    let name = maud::html! { (caption) }.into_string();
    format!("<svg role=\"img\" aria-label=\"{name}\" viewBox=\"{view}\">{inner}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(label: &str, kind: Kind, values: &[f64]) -> Bar {
        Bar::new(label, kind, Spread::of(values.iter().copied()).unwrap())
    }

    #[test]
    fn bars_have_labels_values_ranges_and_the_kind_s_colour() {
        let all = [
            bar("QEMU & co", Kind::Other, &[2.0, 3.0, 4.0]),
            bar("platen", Kind::Simulated, &[1.5]),
        ];
        let svg = bars("total \"time\"", "seconds", 1, &all).unwrap().svg;
        for text in ["QEMU &amp; co", "3.0", "1.5", "seconds", "#A0B002", "#A0B004", "&quot;time"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        assert!(!svg.contains("http") && svg.starts_with("<svg role"), "{svg}");
        assert!(bars("nothing", "s", 0, &[]).is_none());
        assert!(bars("zero", "s", 0, &[bar("a", Kind::Other, &[0.0])]).is_none());
        assert!(bars("negative", "s", 0, &[bar("a", Kind::Other, &[-1.0, 2.0])]).is_none());
    }

    #[test]
    fn values_for_which_plotters_finds_no_marks_are_not_drawn() {
        let axes = Axes { x: "jobs", y: "MB/s", doubling: false };
        for wild in [5e-324, 1e-300, 1e16, 1e308, f64::INFINITY, f64::NAN] {
            let spread = Spread::one(wild);
            let one = Bar::new("a", Kind::Other, spread);
            assert!(bars("wild", "s", 0, &[one]).is_none(), "a bar of {wild}");
            for x in [1.0, wild].into_iter().filter(|x| !(0.0..1.0).contains(x)) {
                let y = if x == wild { 1.0 } else { wild };
                let points = vec![(x, Spread::one(y))];
                let line = Line { label: "l".into(), simulated: false, points };
                assert!(lines("wild", axes, &[line]).is_none(), "a point at {x}, {y}");
            }
        }
    }

    #[test]
    fn simulated_lines_are_dashed_and_doublings_are_marked() {
        let points = |values: [f64; 3]| {
            [1.0, 2.0, 16.0].into_iter().zip(values.map(Spread::one)).collect::<Vec<_>>()
        };
        let line =
            |simulated| Line { label: "l".into(), simulated, points: points([1.0, 2.0, 3.0]) };
        let axes = Axes { x: "jobs", y: "MB/s", doubling: true };
        let solid = lines("speed", axes, &[line(false)]).unwrap();
        let dashed = lines("speed", axes, &[line(true)]).unwrap();
        let pieces = |svg: &str| svg.matches("<polyline").count() + svg.matches("<line").count();
        assert!(pieces(&dashed.svg) > pieces(&solid.svg) + 10, "{}", dashed.svg);
        assert!(solid.svg.contains(">\n16\n<") || solid.svg.contains(">16<"), "{}", solid.svg);
        assert_eq!(dashed.legend, [("l".to_owned(), true)]);
        assert!(lines("nothing", axes, &[]).is_none());
        let one =
            Line { label: "one".into(), simulated: false, points: vec![(4.0, Spread::one(1.0))] };
        assert!(lines("one point", axes, &[one]).is_some());
    }

    #[test]
    fn numbers_of_an_axis_are_short() {
        let shown = [0.0, 0.25, 2.5, 3.0, 12.5, 4096.0].map(plain);
        assert_eq!(shown, ["0", "0.25", "2.5", "3", "12.5", "4,096"]);
    }
}
