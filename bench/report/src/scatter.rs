//! A figure of pairs: each a dot, beside the line on which both values are equal.

use plotters::prelude::*;

use crate::figure::{draw, labelled, plain, Figure, Kind, GRID, INK, TEXT};

/// Marks of both axes.
const MARKS: [f64; 13] =
    [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
/// Dots of a figure at most.
const MOST: usize = 200;

/// A pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dot {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) kind: Kind,
}

/// Dots on two logarithmic axes of the same range, with the line of equal values and those of
/// `within` of it; `None` without a dot, or with values that the axes have no marks for.
pub(crate) fn scatter(
    caption: &str,
    [x, y]: [&str; 2],
    within: f64,
    dots: &[Dot],
) -> Option<Figure> {
    let dots = &dots[..dots.len().min(MOST)];
    let values = || dots.iter().flat_map(|dot| [dot.x, dot.y]);
    let least = values().fold(f64::INFINITY, f64::min);
    let most = values().fold(0.0, f64::max);
    let [first, .., last] = MARKS;
    if dots.is_empty() || !values().all(|value| (first..=last).contains(&value)) {
        return None;
    }
    let (from, to) = (least / 1.25, most * 1.25);
    let keys: Vec<f64> = MARKS.into_iter().filter(|mark| (from..=to).contains(mark)).collect();
    let svg = draw(440, |root| {
        let axis = || (from..to).log_scale().with_key_points(keys.clone());
        let mut chart = ChartBuilder::on(root)
            .margin(4)
            .margin_right(14)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(axis(), axis())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(GRID)
            .x_desc(x)
            .y_desc(y)
            .x_label_formatter(&|value| plain(*value))
            .y_label_formatter(&|value| plain(*value))
            .label_style(("sans-serif", TEXT).into_font().color(&INK))
            .draw()?;
        chart.draw_series(LineSeries::new([(from, from), (to, to)], INK.stroke_width(1)))?;
        for edge in [1.0 - within, 1.0 + within] {
            // Cut where it leaves the figure.
            let (left, right) = (from.max(from / edge), to.min(to / edge));
            let ends = [(left, left * edge), (right, right * edge)];
            chart.draw_series(DashedLineSeries::new(ends, 5, 4, INK.stroke_width(1)))?;
        }
        let circle = |dot: &Dot| Circle::new((dot.x, dot.y), 5, dot.kind.colour().filled());
        chart.draw_series(dots.iter().map(circle))?;
        Ok(())
    })?;
    Some(Figure { caption: caption.into(), svg: labelled(&svg, caption), legend: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_is_a_dot_of_its_kind_s_colour() {
        let dot = |x, y, kind| Dot { x, y, kind };
        let dots = [dot(1.0, 1.1, Kind::Platen), dot(20.0, 14.0, Kind::Other)];
        let svg = scatter("times", ["measured s", "predicted s"], 0.15, &dots).unwrap().svg;
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
        for text in ["#A0B002", "#A0B003", "measured s", "predicted s", ">\n10\n<"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        for wild in [0.0, -1.0, 1e9, f64::NAN, f64::INFINITY] {
            let dots = [dot(1.0, wild, Kind::Platen)];
            assert!(scatter("wild", ["x", "y"], 0.15, &dots).is_none(), "{wild}");
        }
        assert!(scatter("none", ["x", "y"], 0.15, &[]).is_none());
    }
}
