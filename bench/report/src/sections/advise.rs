//! `platen advise`: predicted against measured.

use serde_json::Value;

use crate::data::{each, number, text, Data};
use crate::figure::Kind;
use crate::scatter::{scatter, Dot};
use crate::section::{Finding, Section, Table};
use crate::spread::grouped;

/// A total time is predicted well within this.
const WITHIN: f64 = 0.15;

/// A prediction of the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Converges,
    Uncertain,
    Never,
}

/// A point of the file of `advise_bench`.
struct Point {
    name: String,
    kind: Kind,
    verdict: Verdict,
    /// Seconds; `None` where the prediction is that it does not converge.
    predicted: Option<f64>,
    /// Seconds; `None` where it did not end within the limit.
    measured: Option<f64>,
    /// Seconds after which the benchmark waited no longer; `None` in a file without it.
    limit: Option<f64>,
    /// CPUs that a migration would get, at the time of the prediction.
    free: Option<f64>,
    /// Megabytes on the network and CPU seconds of both ends, predicted and measured.
    bytes: [Option<f64>; 2],
    cpu: [Option<f64>; 2],
}

impl Point {
    fn read(point: &Value, limit: Option<f64>) -> Option<Self> {
        let method = text(point, "/method");
        let rate = number(point, "/load/rate")?;
        let guest = match rate {
            0.0..=1.0 => "idle".to_owned(),
            _ => format!("{rate:.0} writes/s"),
        };
        let link = number(point, "/link")?;
        let pages = text(point, "/pages");
        let seconds = |at: &str| Some(number(point, at)? / 1e3).filter(|seconds| *seconds > 0.0);
        let cpu = |end: &str| {
            let of = |side: &str| number(point, &format!("/{end}/cpu-{side}"));
            Some(of("source")? + of("destination")?)
        };
        let bytes = |end: &str| Some(number(point, &format!("/{end}/transferred"))? / 1e6);
        let verdict = match text(point, "/predicted/verdict").as_str() {
            "converges" => Verdict::Converges,
            "never" => Verdict::Never,
            _ => Verdict::Uncertain,
        };
        let kind = if method.starts_with("platen") { Kind::Platen } else { Kind::Other };
        Some(Self {
            name: format!("{method}; {link:.0} Mbit/s, {pages} pages, {guest}"),
            kind,
            verdict,
            predicted: seconds("/predicted/total-time"),
            measured: seconds("/measured/total-time"),
            limit,
            free: number(point, "/advice/free-cores"),
            bytes: ["predicted", "measured"].map(bytes),
            cpu: ["predicted", "measured"].map(cpu),
        })
    }

    /// Predicted over measured total time.
    fn ratio(&self) -> Option<f64> {
        Some(self.predicted? / self.measured?)
    }

    /// Whether the benchmark waited too briefly to tell: the predicted time, with its error, is
    /// beyond the limit.
    fn is_cut(&self) -> bool {
        self.measured.is_none()
            && self
                .predicted
                .zip(self.limit)
                .is_some_and(|(predicted, limit)| predicted >= limit * (1.0 - WITHIN))
    }

    fn said(&self) -> &'static str {
        match (self.verdict, self.measured.is_some()) {
            (Verdict::Converges, true) => "yes, as predicted",
            (Verdict::Never, false) => "not within the limit, as predicted",
            (Verdict::Uncertain, true) => "yes; predicted: perhaps",
            (Verdict::Uncertain, false) => "not within the limit; predicted: perhaps",
            (Verdict::Converges, false) if self.is_cut() => {
                "not within the limit; predicted: beyond it"
            }
            (Verdict::Converges, false) => "NO, PREDICTED WRONGLY",
            (Verdict::Never, true) => "YES, PREDICTED WRONGLY",
        }
    }

    fn is_wrong(&self) -> bool {
        match (self.verdict, self.measured) {
            (Verdict::Converges, None) => !self.is_cut(),
            (Verdict::Never, Some(_)) => true,
            _ => false,
        }
    }

    fn cells(&self) -> Vec<String> {
        let show = |value: Option<f64>, digits| {
            value.map_or_else(|| "–".to_owned(), |value| grouped(value, digits))
        };
        let pair = |[predicted, measured]: [Option<f64>; 2], digits| {
            format!("{} / {}", show(predicted, digits), show(measured, digits))
        };
        vec![
            self.name.clone(),
            show(self.predicted, 2),
            show(self.measured, 2),
            show(self.ratio(), 2),
            self.said().to_owned(),
            pair(self.bytes, 0),
            pair(self.cpu, 1),
            show(self.free, 1),
        ]
    }
}

pub(crate) fn section(data: &Data) -> Section {
    let mut section =
        Section::new("advise", "platen advise: predicted against measured", &["advise"]);
    section.text(
        "platen advise predicts how long a migration takes, and whether it converges. Its \
         benchmark (advise_bench) has it predict each migration, and then makes the migration: \
         links, guests, codecs and rates of writes, with both ends on this machine.",
    );
    match data.samples("advise") {
        Ok(samples) => here(&mut section, samples),
        Err(why) => {
            section.missing(format!(
                "No predictions were compared: {why}. A whole `make report` runs that benchmark, a \
                 quick one does not."
            ));
            section.findings(findings(&[]));
        }
    }
    section
}

fn here(section: &mut Section, samples: &Value) {
    let limit = number(samples, "/limit").filter(|limit| *limit > 0.0);
    let read = |point| Point::read(point, limit);
    let points: Vec<Point> = each(samples, "/points").iter().filter_map(read).collect();
    if points.is_empty() {
        section.missing("The file has no points.");
        return;
    }
    let head = [
        "migration",
        "predicted s",
        "measured s",
        "predicted / measured",
        "converges",
        "MB, predicted / measured",
        "CPU s, predicted / measured",
        "CPUs to be had",
    ];
    let data = number(samples, "/data").unwrap_or(0.0);
    let caption = format!("Each point, measured once: a guest with {data:.0} MiB of data");
    let mut table = Table::new(caption, &head);
    let mut dots = Vec::new();
    for point in &points {
        table.row(Some(point.kind), point.cells());
        if let (Some(x), Some(y)) = (point.measured, point.predicted) {
            dots.push(Dot { x, y, kind: point.kind });
        }
    }
    let percent = WITHIN * 100.0;
    let caption =
        format!("Total time: each migration, and the lines that are {percent:.0} % off at most");
    section.figures([scatter(&caption, ["measured s", "predicted s"], WITHIN, &dots)]);
    section.table(table);
    section.findings(findings(&points));
    if let Some(limit) = limit {
        section.text(format!(
            "The benchmark waits {limit:.0} s for a migration. One that has not ended by then may \
             still converge later: the limit agrees with \"does not converge\", and does not prove \
             it. It proves no verdict wrong where the predicted time is near the limit or beyond."
        ));
    }
    section.text(
        "A prediction is made while the guest already writes, and the migration comes some \
         seconds later. Where others use the machine, they may take more or less of it then: the \
         last column has what the prediction counted on.",
    );
}

fn findings(points: &[Point]) -> Vec<Finding> {
    vec![times(points), verdicts(points)].into_iter().map(Finding::of_platen).collect()
}

fn times(points: &[Point]) -> Finding {
    let claim = format!("The total time is predicted within {:.0} %.", WITHIN * 100.0);
    let mut off: Vec<f64> =
        points.iter().filter_map(Point::ratio).map(|ratio| (ratio - 1.0).abs()).collect();
    off.sort_by(f64::total_cmp);
    let (Some(middle), Some(most)) = (off.get(off.len() / 2), off.last()) else {
        return Finding::open(&claim, "No total time was measured.");
    };
    let near = off.iter().filter(|off| **off <= WITHIN).count();
    let all = off.len();
    let found = format!(
        "{near} of {all} are. Half of them are within {:.0} %, all within {:.0} %.",
        middle * 100.0,
        most * 100.0
    );
    Finding::of(&claim, found, near == all).here(format!("{near} of {all}"))
}

fn verdicts(points: &[Point]) -> Finding {
    let claim = "\"Does not converge\" is never wrong.";
    let all = points.len();
    if all == 0 {
        return Finding::open(claim, "No verdict was compared.");
    }
    let count = |which: fn(&Point) -> bool| points.iter().filter(|point| which(point)).count();
    if count(|point| point.verdict == Verdict::Never) == 0 && count(Point::is_wrong) == 0 {
        return Finding::open(claim, "No prediction was \"does not converge\".");
    }
    let perhaps = count(|point| point.verdict == Verdict::Uncertain);
    let (wrong, cut) = (count(Point::is_wrong), count(Point::is_cut));
    let mut found = format!("{wrong} of {all} verdicts are wrong; {perhaps} leave it open");
    if cut > 0 {
        found.push_str(&format!("; the benchmark's limit hides how {cut} ended"));
    }
    found.push('.');
    Finding::of(claim, found, wrong == 0).here(format!("{wrong} of {all} are wrong"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn within(limit: f64, verdict: &str, predicted: f64, measured: Option<f64>) -> Point {
        let measured = measured.map(|ms| {
            json!({"total-time": ms, "transferred": 1e6,
            "cpu-source": 1.0, "cpu-destination": 0.5})
        });
        let point = json!({"method": "platen", "link": 200, "pages": "guest",
            "load": {"rate": 500, "whole": 30, "mib": 32},
            "predicted": {"verdict": verdict, "total-time": predicted}, "measured": measured});
        Point::read(&point, Some(limit)).unwrap()
    }

    fn point(verdict: &str, predicted: f64, measured: Option<f64>) -> Point {
        within(60.0, verdict, predicted, measured)
    }

    #[test]
    fn verdicts_are_compared_with_what_happened() {
        let [right, wrong, open, unended] = [
            point("converges", 1000.0, Some(1100.0)),
            point("never", 1000.0, Some(1100.0)),
            point("uncertain", 1000.0, None),
            point("converges", 1000.0, None),
        ];
        assert_eq!(right.name, "platen; 200 Mbit/s, guest pages, 500 writes/s");
        assert!(!right.is_wrong() && wrong.is_wrong() && !open.is_wrong() && unended.is_wrong());
        let found = findings(&[right, wrong, open, unended]);
        assert!(found[0].found.starts_with("2 of 2 are"), "{}", found[0].found);
        assert!(found[1].found.starts_with("2 of 4 verdicts are wrong; 1"), "{}", found[1].found);
    }

    /// Regression: the claim was confirmed by points of which none had that verdict.
    #[test]
    fn a_verdict_that_was_never_given_is_not_confirmed() {
        let found = findings(&[point("converges", 1000.0, Some(1100.0))]);
        assert!(found[1].found.starts_with("No prediction was"), "{}", found[1].found);
        assert_eq!(found[1].verdict, findings(&[])[1].verdict);
    }

    /// Regression: a migration that was predicted to end after the benchmark's limit, and had not
    /// ended by then, counted as predicted wrongly; and the page did not say that there is a limit.
    #[test]
    fn what_the_limit_alone_decides_is_no_wrong_verdict() {
        let [beyond, near, wrong] = [
            within(60.0, "converges", 90_000.0, None),
            within(60.0, "converges", 55_000.0, None),
            within(60.0, "converges", 20_000.0, None),
        ];
        assert!(!beyond.is_wrong() && !near.is_wrong() && wrong.is_wrong());
        assert!(beyond.said().contains("beyond it") && wrong.said().contains("WRONGLY"));
        let found = &findings(&[beyond, near, wrong])[1];
        assert!(found.found.starts_with("1 of 3 verdicts are wrong; 0"), "{}", found.found);
        assert!(found.found.contains("limit hides how 2 ended"), "{}", found.found);
        let points = json!([{"method": "platen", "link": 200, "pages": "guest",
            "load": {"rate": 1}, "predicted": {"verdict": "never"}, "measured": null}]);
        let mut section = Section::new("advise", "", &[]);
        here(&mut section, &json!({"limit": 60, "points": points}));
        let said = format!("{:?}", section.blocks);
        assert!(said.contains("waits 60 s") && said.contains("not within the limit"), "{said}");
    }
}
