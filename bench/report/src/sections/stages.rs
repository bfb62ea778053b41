//! The file of `platen-bench hop`: memory and CPU time of both relays, by stage.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::data::{each, number, numbers, text};
use crate::figure::Kind;
use crate::section::Table;
use crate::spread::Spread;

/// One row of the file.
pub(crate) struct Hop<'a> {
    pub(crate) channels: u64,
    pub(crate) codec: String,
    pub(crate) tls: bool,
    pub(crate) ratio: f64,
    /// GiB of QEMU's stream.
    gib: f64,
    runs: &'a [Value],
}

/// The rows of a file that have runs.
pub(crate) fn hops<'a>(samples: &'a Value) -> Vec<Hop<'a>> {
    let rows = each(samples, "/hop").iter();
    let read = |row: &'a Value| {
        Some(Hop {
            channels: row["channels"].as_u64()?,
            codec: text(row, "/codec"),
            tls: row["tls"].as_bool()?,
            ratio: number(row, "/ratio").filter(|ratio| *ratio > 0.0)?,
            gib: number(row, "/plain").filter(|plain| *plain > 0.0)? / f64::from(1 << 30),
            runs: each(row, "/each"),
        })
    };
    rows.filter_map(read).filter(|hop| !hop.runs.is_empty()).collect()
}

impl Hop<'_> {
    /// CPU seconds for a GiB at `source` or `destination`.
    pub(crate) fn cpu(&self, end: &str) -> Option<Spread> {
        let values = numbers(self.runs, &format!("/{end}-cpu"));
        Spread::of(values.into_iter().map(|seconds| seconds / self.gib))
    }

    /// GB/s of QEMU's stream.
    pub(crate) fn speed(&self) -> Option<Spread> {
        let seconds = numbers(self.runs, "/seconds").into_iter().filter(|seconds| *seconds > 0.0);
        Spread::of(seconds.map(|seconds| self.gib * 1.073_741_824 / seconds))
    }

    /// Median CPU seconds for a GiB of each stage at an end.
    pub(crate) fn stages(&self, end: &str) -> BTreeMap<String, f64> {
        let mut all: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for run in self.runs {
            let stages = run.get(format!("{end}-stages")).and_then(Value::as_object);
            for (name, seconds) in stages.into_iter().flatten().take(100) {
                let name = crate::data::short(name);
                all.entry(name).or_default().extend(seconds.as_f64());
            }
        }
        let median = |values: Vec<f64>| Some(Spread::of(values)?.median / self.gib);
        all.into_iter().filter_map(|(name, values)| Some((name, median(values)?))).collect()
    }

    /// The most memory of a relay, MB.
    fn peak(&self, end: &str) -> Option<Spread> {
        let values = numbers(self.runs, &format!("/{end}-peak-kib"));
        Spread::of(values.into_iter().map(|kib| kib * 1024.0 / 1e6).filter(|mb| *mb > 0.0))
    }
}

/// The memory of each relay, by channels.
pub(crate) fn memory(samples: &Value) -> Table {
    let head = ["channels", "sender MB", "receiver MB"];
    let mut table = Table::new("Here: the most memory of platen's relays, zstd, TLS", &head);
    for hop in hops(samples).iter().filter(|hop| hop.codec == "zstd" && hop.tls) {
        let ends = ["source", "destination"].map(|end| super::moves::cell(hop.peak(end), 0));
        let channels = match hop.channels {
            0 => "one stream".to_owned(),
            channels => channels.to_string(),
        };
        table.row(Some(Kind::Platen), [vec![channels], ends.to_vec()].concat());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn costs_are_for_a_gib_and_rows_without_runs_are_left_out() {
        let run = json!({"seconds": 2.0, "source-cpu": 3.0, "destination-cpu": 1.0,
            "source-peak-kib": 50_000, "destination-peak-kib": 40_000,
            "source-stages": {"compress": 2.0}, "destination-stages": {}});
        let row = |each: Value| {
            json!({"channels": 2, "codec": "zstd", "tls": true, "ratio": 2.5,
                "plain": 1_u64 << 31, "each": each})
        };
        let samples = json!({"hop": [row(json!([run])), row(json!([])), row(json!(5)), 7]});
        let hops = hops(&samples);
        assert_eq!(hops.len(), 1);
        assert_eq!(hops[0].cpu("source").unwrap().median, 1.5);
        assert_eq!(hops[0].stages("source")["compress"], 1.0);
        assert_eq!(memory(&samples).rows[0].cells, ["2", "51", "41"]);
    }
}
