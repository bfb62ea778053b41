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
    /// Codec threads of each relay and connections between them, where the run chose them.
    pub(crate) threads: Option<u64>,
    pub(crate) links: Option<u64>,
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
            threads: row["threads"].as_u64(),
            links: row["links"].as_u64(),
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

    /// CPU seconds for a GiB of the benchmark, which plays both QEMUs.
    pub(crate) fn players(&self) -> Option<Spread> {
        Spread::of(numbers(self.runs, "/bench-cpu").into_iter().map(|seconds| seconds / self.gib))
    }

    /// CPUs that the relays and the benchmark kept busy.
    pub(crate) fn busy(&self) -> Option<Spread> {
        Spread::of(self.runs.iter().filter_map(|run| {
            let of = |field| number(run, field);
            Some((of("/cpu")? + of("/bench-cpu")?) / of("/seconds").filter(|s| *s > 0.0)?)
        }))
    }

    /// The busiest thread of both relays and of the benchmark, and its share of a CPU.
    pub(crate) fn busiest(&self) -> Option<(String, f64)> {
        let mut shares: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for run in self.runs {
            let Some(seconds) = number(run, "/seconds").filter(|s| *s > 0.0) else { continue };
            let mut add = |name: String, cpu: Option<f64>| {
                shares.entry(name).or_default().extend(cpu.map(|cpu| cpu / seconds));
            };
            add("the benchmark".to_owned(), number(run, "/bench-busiest"));
            for end in ["source", "destination"] {
                let threads = run.get(format!("{end}-busiest")).and_then(Value::as_object);
                for (name, cpu) in threads.into_iter().flatten().take(100) {
                    add(format!("{} ({end})", crate::data::short(name)), cpu.as_f64());
                }
            }
        }
        let medians =
            shares.into_iter().filter_map(|(name, all)| Some((name, Spread::of(all)?.median)));
        medians.max_by(|one, other| one.1.total_cmp(&other.1))
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
