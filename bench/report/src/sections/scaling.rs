//! Where one pair of relays saturates: computed from the measured cost of a GiB in each stage.

use std::collections::BTreeMap;

use super::stages::{hops, Hop};
use crate::data::Data;
use crate::figure::{bars, Bar, Kind};
use crate::section::{Row, Section, Table};
use crate::spread::{grouped, Spread};

/// Link in Gbit/s, and CPUs at each end.
const MACHINES: [(f64, f64); 4] = [(25.0, 16.0), (25.0, 64.0), (100.0, 16.0), (100.0, 64.0)];
/// Bits in a GiB, in Gbit.
const GBIT: f64 = 8.0 * 1.073_741_824;
/// Stages that all CPUs share; each other one has a thread for each stream.
const SHARED: [&str; 2] = ["compress", "decompress"];
/// Stages whose work is that of a migration's beginning and end, whatever its bytes: handshakes
/// and keys. A sample of a few hundred MiB would make them look like a cost of a GiB.
const ONCE: [&str; 5] = ["platen", "hello", "ctrl-c", "accept", "relink"];

pub(crate) fn section(data: &Data) -> Section {
    let mut section =
        Section::new("scaling", "Scaling: one pair of relays on larger machines", &["hop"]);
    section.text(
        "A SIMULATION on paper: computed, not measured on such machines. The costs are measured \
         here: CPU seconds of both relays for a GiB of QEMU's stream, by codec and by stage, with \
         TLS, over the loopback device. A pair of relays saturates where the first of these is \
         used up: the link, the CPUs of an end, or the one thread of a stage that is busiest.",
    );
    let samples = match data.samples("hop") {
        Ok(samples) => samples,
        Err(why) => {
            section.missing(format!("Nothing to compute from: {why}."));
            return section;
        }
    };
    let all = hops(samples);
    let secure: Vec<&Hop<'_>> = all.iter().filter(|hop| hop.tls).collect();
    section.table(costs(&secure));
    let Some(most) = secure.iter().map(|hop| hop.channels).max() else {
        section.missing("The file has no rows with TLS.");
        return section;
    };
    let (table, figure) = computed(&secure, most);
    let is_refuted = |row: &Row| row.cells.iter().any(|cell| cell.ends_with(REFUTED));
    let has_refuted = table.rows.iter().any(is_refuted);
    section.table(table);
    let caption = format!("COMPUTED: guest memory over {most} channels");
    section.figures([bars(&caption, "Gbit/s", 0, &figure)]);
    if has_refuted {
        section.text(MEASURED);
    }
    section.text(ASSUMPTIONS);
    section
}

/// Gbit/s of guest memory that 8 channels carried with TLS and codec `none` on 16 cores.
const CARRIED: f64 = 28.0;
/// The mark of a rate above that.
const REFUTED: &str = " (refuted)";
const MEASURED: &str =
    "REFUTED: a rate of codec none over channels above 28 Gbit/s is no forecast. The model was \
     compared with a machine of 16 cores: there 8 channels with TLS carried 0.38 of the rate that it \
     computes for that machine, since the writer of the first link used a whole CPU, and 0.54 of it \
     (28 Gbit/s) since a writer without time passes frames on. The limit that remains was not \
     measured. Every run of 0.38 lies in docs/report/threads of the sources, and docs/figures.md \
     has both figures (section \"Measured on 16 cores\").";

const ASSUMPTIONS: &str =
    "Assumptions. A CPU there is as fast as one here, and twice the CPUs do twice the work: memory \
     bandwidth, caches and NUMA are left out. The relays have the CPUs to themselves. \
     --compress-threads and --decompress-threads are the number of CPUs (the default is at most \
     8), and --links the number of streams. Every other stage has one thread for a stream, and the \
     streams carry equal shares. The pages shrink as those of the benchmark do. QEMU itself keeps \
     up, and the network costs as much CPU as the loopback device, which has no NIC's interrupts \
     and no offloads. The cost of a migration's beginning (handshakes, keys) is left out. The \
     kernel counts a thread's CPU time in steps of 10 ms, so that a stage of a short sample is \
     known to some hundredths of a second for a GiB.";

/// The tables for a document, with their assumptions, as Markdown; `None` without samples.
pub(crate) fn markdown(data: &Data) -> Option<String> {
    let all = hops(data.samples("hop").ok()?);
    let secure: Vec<&Hop<'_>> = all.iter().filter(|hop| hop.tls).collect();
    let most = secure.iter().map(|hop| hop.channels).max()?;
    let tables = [costs(&secure), computed(&secure, most).0];
    let mut text = tables.map(|table| table.markdown()).join("\n") + "\n";
    let mut column = 0;
    for word in ASSUMPTIONS.split(' ') {
        let is_full = column + word.len() >= 100;
        text.push_str(if is_full {
            "\n"
        } else if column > 0 {
            " "
        } else {
            ""
        });
        column = if is_full { word.len() } else { column + 1 + word.len() };
        text.push_str(word);
    }
    Some(text + "\n")
}

/// The rates for each machine, and their bars.
fn computed(secure: &[&Hop<'_>], most: u64) -> (Table, Vec<Bar>) {
    let mut table = Table::new(
        "Computed: Gbit/s of guest memory, and what limits it",
        &[
            "link, CPUs at each end",
            "codec",
            "one stream",
            "limit",
            "channels",
            "Gbit/s",
            "limit",
            "CPUs busy: sender",
            "receiver",
        ],
    );
    let mut figure = Vec::new();
    for (link, cpus) in MACHINES {
        for codec in ["none", "lz4", "zstd"] {
            let find =
                |channels| secure.iter().find(|hop| hop.codec == codec && hop.channels == channels);
            let bound = |hop: Option<&&Hop<'_>>| hop.and_then(|hop| fastest(hop, link, cpus));
            let (one, many) = (bound(find(0)), bound(find(most)));
            if one.is_none() && many.is_none() {
                continue;
            }
            let busy = |end: &str| {
                let cost = find(most).and_then(|hop| cost(hop, end)).zip(many.as_ref());
                cost.map_or("–".to_owned(), |(cost, (rate, _))| grouped(cost * rate / GBIT, 1))
            };
            let mark = match &many {
                Some((rate, _)) if codec == "none" && most > 0 && *rate > CARRIED => REFUTED,
                _ => "",
            };
            let show = |bound: &Option<(f64, String)>, mark: &str| match bound {
                Some((rate, why)) => [grouped(*rate, 0), format!("{why}{mark}")],
                None => ["–".to_owned(), "not measured".to_owned()],
            };
            let machine = format!("{link:.0} Gbit/s, {cpus:.0}");
            if let Some((rate, _)) = &many {
                let label = format!("{machine} CPUs, {codec}{mark}");
                figure.push(Bar::new(label, Kind::Computed, Spread::one(*rate)));
            }
            let cells = [
                vec![machine, codec.to_owned()],
                show(&one, "").to_vec(),
                vec![most.to_string()],
                show(&many, mark).to_vec(),
                vec![busy("source"), busy("destination")],
            ];
            table.row(Some(Kind::Computed), cells.concat());
        }
    }
    (table, figure)
}

/// The measured costs.
fn costs(hops: &[&Hop<'_>]) -> Table {
    let head = [
        "streams",
        "codec",
        "sender, CPU s/GiB",
        "receiver, CPU s/GiB",
        "GB/s here",
        "ratio",
        "most in one thread",
    ];
    let mut table = Table::new("Measured here: costs of a GiB", &head);
    for hop in hops {
        let busiest = serial(hop).into_iter().max_by(|one, other| one.1.total_cmp(&other.1));
        let cells = vec![
            if hop.channels == 0 { "1".to_owned() } else { format!("1 + {}", hop.channels) },
            hop.codec.clone(),
            cost(hop, "source").map_or("–".into(), |cost| grouped(cost, 2)),
            cost(hop, "destination").map_or("–".into(), |cost| grouped(cost, 2)),
            super::moves::cell(hop.speed(), 2),
            format!("{:.2}", hop.ratio),
            busiest.map_or("–".into(), |(name, cost)| format!("{name} {cost:.2} s")),
        ];
        table.row(Some(Kind::Platen), cells);
    }
    table
}

/// CPU seconds for a GiB at an end, without what a migration costs once.
pub(super) fn cost(hop: &Hop<'_>, end: &str) -> Option<f64> {
    let once: f64 = hop
        .stages(end)
        .iter()
        .filter(|(name, _)| ONCE.contains(&name.as_str()))
        .map(|(_, s)| s)
        .sum();
    Some(hop.cpu(end)?.median - once).filter(|cost| *cost > 0.0)
}

/// Seconds for a GiB of each stage that has a thread for each stream, by one thread.
pub(super) fn serial(hop: &Hop<'_>) -> BTreeMap<String, f64> {
    let streams = hop.channels.max(1) as f64;
    let mut all = BTreeMap::new();
    for end in ["source", "destination"] {
        for (name, cost) in hop.stages(end) {
            let is_serial = ![&SHARED[..], &ONCE].concat().contains(&name.as_str());
            if is_serial && cost > 0.0 {
                let known = all.entry(name).or_insert(0.0_f64);
                *known = known.max(cost / streams);
            }
        }
    }
    all
}

/// The highest rate of guest memory, Gbit/s, and what limits it.
fn fastest(hop: &Hop<'_>, link: f64, cpus: f64) -> Option<(f64, String)> {
    let mut bounds = vec![(link * hop.ratio, "the link".to_owned())];
    for (end, name) in [("source", "the sender's CPUs"), ("destination", "the receiver's CPUs")] {
        bounds.push((cpus / cost(hop, end)? * GBIT, name.to_owned()));
    }
    for (name, cost) in serial(hop) {
        bounds.push((GBIT / cost, format!("the thread {name}")));
    }
    bounds.into_iter().min_by(|one, other| one.0.total_cmp(&other.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_smallest_bound_limits() {
        let run = json!({"seconds": 1.0, "source-cpu": 3.0, "destination-cpu": 1.0,
            "source-stages": {"compress": 1.5, "intake": 0.5, "platen": 1.0},
            "destination-stages": {"deliver": 0.25}});
        let samples = json!({"hop": [{"channels": 0, "codec": "zstd", "tls": true, "ratio": 2.0,
            "plain": 1_u64 << 30, "each": [run]}]});
        let all = hops(&samples);
        let bound = |link, cpus| fastest(&all[0], link, cpus).unwrap();
        assert_eq!(bound(1.0, 16.0), (2.0, "the link".to_owned()));
        assert_eq!(bound(100.0, 2.0), (GBIT, "the sender's CPUs".to_owned()));
        assert_eq!(bound(100.0, 64.0), (2.0 * GBIT, "the thread intake".to_owned()));
    }

    /// Regression: 100 Gbit/s with codec none over 8 channels stood there without a word, although
    /// platen's own measurement on 16 cores had refuted it.
    #[test]
    fn a_rate_that_a_measurement_refutes_is_marked() {
        let run = json!({"seconds": 1.0, "source-cpu": 0.5, "destination-cpu": 0.4,
            "source-stages": {"link-tx": 0.3}, "destination-stages": {"link-rx": 0.3}});
        let row = |channels: u64, codec: &str| {
            json!({"channels": channels, "codec": codec, "tls": true, "ratio": 1.0,
                "plain": 1_u64 << 30, "each": [run]})
        };
        let samples = json!({"hop": [row(0, "none"), row(8, "none"), row(8, "zstd")]});
        let all = hops(&samples);
        let (table, bars) = computed(&all.iter().collect::<Vec<_>>(), 8);
        let marked = |link: &str, codec: &str| {
            let mut rows = table.rows.iter().map(|row| &row.cells);
            let row = rows.find(|row| row[0] == link && row[1] == codec).unwrap();
            [&row[3], &row[6]].map(|limit| limit.ends_with(REFUTED))
        };
        assert_eq!(marked("100 Gbit/s, 16", "none"), [false, true]);
        assert_eq!(marked("100 Gbit/s, 64", "none"), [false, true]);
        // It was measured to carry as much.
        assert_eq!(marked("25 Gbit/s, 16", "none"), [false, false]);
        assert_eq!(marked("100 Gbit/s, 16", "zstd"), [false, false]);
        assert_eq!(bars.iter().filter(|bar| bar.label.ends_with(REFUTED)).count(), 2);
    }
}
