//! The paper's figure 11: redis with more values than memory.

use serde_json::Value;

use crate::data::{each, number, text, Data};
use crate::figure::{lines, Axes, Figure, Kind, Line};
use crate::section::{Section, Table};
use crate::spread::{grouped, Spread};

pub(super) fn add(section: &mut Section, data: &Data) {
    section.heading("Figure 11: redis beyond its memory");
    section.text(
        "The paper states: SET at 1.8 million keys a second until memory is full; beyond it zram \
         at 68 % of that and QZRAM at 83 %; without swap redis is killed at 80 GB, with zram at \
         90 GB, with QZRAM at 150 GB of a machine of 64 GB. GET: zram less than 40 %, QZRAM about \
         90 %.",
    );
    let samples = match data.samples("redis") {
        Ok(samples) => samples,
        Err(why) => {
            section.missing(format!("No redis guests: {why}."));
            return;
        }
    };
    section.table(table(samples));
    let value = number(samples, "/value_bytes").unwrap_or(4000.0);
    section.figures([
        rates(samples, "SET", "stored_by_ms", value),
        rates(samples, "GET", "read_by_ms", value),
    ]);
    section.text(format!(
        "The guest runs under QEMU's TCG with two CPUs: its times compare the rows with each \
         other, and nothing else. Each way ran once. In so small a guest {}; the paper's machine \
         has 64 GB.",
        locked(samples)
    ));
}

/// The memory that platen locks beside its store, as the run measured it.
fn locked(samples: &Value) -> String {
    let mut all = each(samples, "/runs").iter().filter_map(|run| number(run, "/locked_mib"));
    match all.next() {
        Some(mib) => format!(
            "the {mib:.1} MiB that platen locks beside its store are a good part of the memory"
        ),
        None => "the memory that platen locks beside its store is a good part of all memory \
                 (docs/memory.md has the parts)"
            .to_owned(),
    }
}

fn table(samples: &Value) -> Table {
    let head = [
        "swap",
        "values",
        "MiB",
        "fill s",
        "read s",
        "CPU s of the guest",
        "major faults",
        "ended",
    ];
    let memory = number(samples, "/memory_mib").unwrap_or(0.0);
    let value = number(samples, "/value_bytes").unwrap_or(0.0);
    let caption =
        format!("Here: values of {value:.0} bytes in a guest of {memory:.0} MiB; one run each");
    let mut table = Table::new(caption, &head);
    for run in each(samples, "/runs") {
        let name = text(run, "/name");
        let simulated = run["simulated"].as_bool().unwrap_or(false);
        let kind = match (simulated, name.starts_with("platen")) {
            (true, _) => Kind::Simulated,
            (_, true) => Kind::Platen,
            _ => Kind::Other,
        };
        let of = |field: &str, scale: f64, digits| {
            number(run, field).map_or("–".to_owned(), |value| grouped(value / scale, digits))
        };
        let stored =
            number(run, "/values").map_or(0.0, |values| values * value / f64::from(1 << 20));
        let cells = vec![
            name,
            of("/values", 1.0, 0),
            grouped(stored, 0),
            of("/fill_ms", 1e3, 0),
            of("/get_ms", 1e3, 0),
            of("/cpu_seconds", 1.0, 0),
            of("/major_faults", 1.0, 0),
            text(run, "/ended"),
        ];
        table.row(Some(kind), cells);
    }
    table
}

/// Values a second over the amount that is stored, from the client's report of each second.
fn rates(samples: &Value, name: &str, field: &str, value: f64) -> Option<Figure> {
    let mut all = Vec::new();
    for run in each(samples, "/runs") {
        let pair = |beat: &Value| Some((number(beat, "/0")?, number(beat, "/1")?));
        let beats: Vec<(f64, f64)> =
            each(run, &format!("/{field}")).iter().filter_map(pair).collect();
        let mut points = Vec::new();
        let mut last = (0.0, 0.0);
        // Ten points at least, so that one slow second is seen and does not hide the others.
        for beat in beats.iter().step_by((beats.len() / 40).max(1)) {
            let (done, ms) = (beat.0 - last.0, beat.1 - last.1);
            if ms > 0.0 && done >= 0.0 {
                let mib = beat.0 * value / f64::from(1 << 20);
                points.push((mib, Spread::one(done * 1e3 / ms)));
                last = *beat;
            }
        }
        let simulated = run["simulated"].as_bool().unwrap_or(false);
        if !points.is_empty() {
            all.push(Line { label: text(run, "/name"), simulated, points });
        }
    }
    let axes = Axes { x: "MiB so far", y: "values a second", doubling: false };
    lines(&format!("{name}: values a second, over what is done"), axes, &all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Regression: the page said "13 MiB" long after platen locked 8.
    #[test]
    fn the_locked_memory_is_that_of_the_run() {
        let samples = json!({"runs": [{"name": "zram"}, {"name": "platen", "locked_mib": 7.84}]});
        assert!(locked(&samples).starts_with("the 7.8 MiB that platen locks"));
        for without in [json!({"runs": [{"name": "platen"}]}), json!(3)] {
            assert!(locked(&without).ends_with("(docs/memory.md has the parts)"));
        }
    }
}
