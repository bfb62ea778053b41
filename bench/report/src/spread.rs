//! The runs of one measurement: median, least and most.

/// A number that no measurement reaches; larger ones are damage.
const MOST: f64 = 1e15;

/// Median and range of some runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    pub(crate) runs: usize,
}

impl Spread {
    /// Of all finite values; `None` without any.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let is_sound = |value: &f64| value.is_finite() && value.abs() < MOST;
        let mut values: Vec<f64> = values.into_iter().filter(is_sound).collect();
        values.sort_by(f64::total_cmp);
        let (&least, &most) = (values.first()?, values.last()?);
        let half = values.len() / 2;
        let median = match values.len() % 2 {
            1 => values[half],
            _ => f64::midpoint(values[half - 1], values[half]),
        };
        Some(Self { median, least, most, runs: values.len() })
    }

    /// One value without a range, as a document gives it.
    pub(crate) fn one(value: f64) -> Self {
        Self { median: value, least: value, most: value, runs: 1 }
    }

    /// All three values, changed by `change`, which must keep their order.
    pub(crate) fn map(self, change: impl Fn(f64) -> f64) -> Self {
        let Self { median, least, most, runs } = self;
        Self { median: change(median), least: change(least), most: change(most), runs }
    }

    /// "3.20 (3.01 to 3.44)"; without the range if there was one run.
    pub(crate) fn show(&self, digits: usize) -> String {
        let number = |value| grouped(value, digits);
        match self.runs {
            1 => number(self.median),
            _ => {
                format!("{} ({} to {})", number(self.median), number(self.least), number(self.most))
            }
        }
    }
}

/// A number with commas between the thousands.
pub(crate) fn grouped(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |rest| ("-", rest));
    let mut out = sign.to_owned();
    for (nth, digit) in whole.chars().enumerate() {
        if nth > 0 && (whole.len() - nth).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if !fraction.is_empty() {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_ignores_what_is_no_figure() {
        let spread = Spread::of([3.0, f64::NAN, 1.0, f64::INFINITY, 2.0, 4.0, 1e300]).unwrap();
        assert_eq!(spread, Spread { median: 2.5, least: 1.0, most: 4.0, runs: 4 });
        assert_eq!(Spread::of([f64::NAN]), None);
    }

    #[test]
    fn numbers_have_commas_and_ranges() {
        let shown = [grouped(1_234_567.0, 0), grouped(-1234.5, 1), grouped(999.0, 0)];
        assert_eq!(shown, ["1,234,567", "-1,234.5", "999"]);
        assert_eq!(Spread::of([1.0, 2.0, 3.0]).unwrap().show(1), "2.0 (1.0 to 3.0)");
        assert_eq!(Spread::one(5.0).show(0), "5");
    }
}
