//! `platen advise`: predicted against measured total times.

use serde_json::Value;

use crate::data::{each, number, text, Data};
use crate::figure::{bars, Bar, Kind};
use crate::section::{Finding, Section, Table};
use crate::spread::{grouped, Spread};

/// A total time is predicted well within this.
const WITHIN: f64 = 0.15;

pub(crate) fn section(data: &Data) -> Section {
    let mut section =
        Section::new("advise", "platen advise: predicted against measured", &["advise"]);
    section.text(
        "platen advise predicts how long a migration takes, and whether it converges. Its \
         benchmark predicts migrations and then makes them. It is a run of its own: the load \
         during it is not known here.",
    );
    match data.samples("advise") {
        Ok(samples) => here(&mut section, samples),
        Err(why) => section.missing(format!(
            "No predictions were compared: {why}. The benchmark of platen advise writes that file."
        )),
    }
    section
}

fn here(section: &mut Section, samples: &Value) {
    let head = ["migration", "predicted s", "measured s", "predicted / measured", "converges"];
    let mut table = Table::new("Each point", &head);
    let mut ratios = Vec::new();
    let (mut near, mut timed, mut wrong, mut all) = (0, 0, 0, 0);
    for point in each(samples, "/points") {
        all += 1;
        let name = text(point, "/name");
        let predicted = number(point, "/predicted_s").filter(|seconds| *seconds > 0.0);
        let times = each(point, "/measured_s").iter().filter_map(Value::as_f64);
        let measured = Spread::of(times.filter(|seconds| *seconds > 0.0));
        let is = |field: &str| point.get(field).and_then(Value::as_bool);
        let converges = (is("predicted_converges"), is("measured_converges"));
        let said = match converges {
            (Some(predicted), Some(measured)) if predicted == measured => {
                if measured {
                    "yes, as predicted"
                } else {
                    "no, as predicted"
                }
            }
            (Some(_), Some(_)) => {
                wrong += 1;
                "PREDICTED WRONGLY"
            }
            _ => "–",
        };
        let ratio = predicted.zip(measured).map(|(predicted, measured)| {
            let of = Spread::of([measured.least, measured.median, measured.most]);
            of.map(|spread| Spread {
                median: predicted / spread.median,
                least: predicted / spread.most,
                most: predicted / spread.least,
                runs: measured.runs,
            })
        });
        if let Some(ratio) = ratio.flatten() {
            timed += 1;
            near += i32::from((ratio.median - 1.0).abs() <= WITHIN);
            ratios.push(Bar::new(&name, Kind::Computed, ratio));
        }
        let cells = vec![
            name,
            predicted.map_or("–".into(), |seconds| grouped(seconds, 2)),
            super::moves::cell(measured, 2),
            ratio.flatten().map_or("–".into(), |ratio| ratio.show(2)),
            said.to_owned(),
        ];
        table.row(None, cells);
    }
    section.table(table);
    section.figures([bars("Predicted by measured total time", "1 is right", 2, &ratios)]);
    let percent = WITHIN * 100.0;
    let mut findings = Vec::new();
    if timed > 0 {
        let claim = format!("The total time is predicted within {percent:.0} %.");
        findings.push(Finding::of(&claim, format!("{near} of {timed} are."), near == timed));
    }
    if all > 0 {
        let found = format!("{wrong} of {all} predictions are wrong.");
        findings.push(Finding::of("\"Does not converge\" is never wrong.", found, wrong == 0));
    } else {
        section.missing("The file has no points.");
    }
    section.findings(findings);
}
