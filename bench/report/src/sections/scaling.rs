//! Where one pair of relays saturates: computed from the measured cost of a GiB in each stage.

use std::collections::BTreeMap;

use super::stages::{hops, Hop};
use crate::data::Data;
use crate::figure::{bars, Bar, Kind};
use crate::section::{Section, Table};
use crate::spread::{grouped, Spread};

/// Link in Gbit/s, and CPUs at each end.
const MACHINES: [(f64, f64); 4] = [(25.0, 16.0), (25.0, 64.0), (100.0, 16.0), (100.0, 64.0)];
/// Bits in a GiB, in Gbit.
const GBIT: f64 = 8.0 * 1.073_741_824;
/// Stages that all CPUs share; each other one has a thread for each stream.
const SHARED: [&str; 2] = ["compress", "decompress"];

pub(crate) fn section(data: &Data) -> Section {
    let mut section =
        Section::new("scaling", "Scaling: one pair of relays on larger machines", &["hop"]);
    section.text(
        "COMPUTED, not measured. The costs are measured here: CPU seconds of both relays for a \
         GiB of QEMU's stream, by codec and by stage, with TLS, over the loopback device.",
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
    let mut table = Table::new(
        "Computed: Gbit/s of guest memory, and what limits it",
        &["link, CPUs at each end", "codec", "one stream", "limit", "channels", "Gbit/s", "limit"],
    );
    let mut figure = Vec::new();
    for (link, cpus) in MACHINES {
        for codec in ["none", "lz4", "zstd"] {
            let find =
                |channels| secure.iter().find(|hop| hop.codec == codec && hop.channels == channels);
            let bound = |hop: Option<&&Hop<'_>>| hop.and_then(|hop| fastest(hop, link, cpus));
            let (one, many) = (bound(find(0)), bound(find(most)));
            let show = |bound: &Option<(f64, String)>| match bound {
                Some((rate, why)) => [grouped(*rate, 0), why.clone()],
                None => ["–".to_owned(), "not measured".to_owned()],
            };
            let machine = format!("{link:.0} Gbit/s, {cpus:.0}");
            if let Some((rate, _)) = &many {
                let label = format!("{machine} CPUs, {codec}");
                figure.push(Bar::new(label, Kind::Computed, Spread::one(*rate)));
            }
            let cells = [
                vec![machine, codec.to_owned()],
                show(&one).to_vec(),
                vec![most.to_string()],
                show(&many).to_vec(),
            ];
            table.row(Some(Kind::Computed), cells.concat());
        }
    }
    section.table(table);
    let caption = format!("COMPUTED: guest memory over {most} channels");
    section.figures([bars(&caption, "Gbit/s", 0, &figure)]);
    section.text(
        "Assumptions. A CPU there is as fast as one here, and twice the CPUs do twice the work: \
         memory bandwidth, caches and NUMA are left out. The relays have the CPUs to themselves. \
         --compress-threads and --decompress-threads are the number of CPUs (the default is at \
         most 8), and --links the number of streams. Every other stage has one thread for a \
         stream, and the streams carry equal shares. The pages shrink as those of the benchmark \
         do. QEMU itself keeps up, and the network costs as much CPU as the loopback device, \
         which has no NIC's interrupts and no offloads.",
    );
    section
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
            super::moves::cell(hop.cpu("source"), 2),
            super::moves::cell(hop.cpu("destination"), 2),
            super::moves::cell(hop.speed(), 2),
            format!("{:.2}", hop.ratio),
            busiest.map_or("–".into(), |(name, cost)| format!("{name} {cost:.2} s")),
        ];
        table.row(Some(Kind::Platen), cells);
    }
    table
}

/// Seconds for a GiB of each stage that has a thread for each stream, by one thread.
fn serial(hop: &Hop<'_>) -> BTreeMap<String, f64> {
    let streams = hop.channels.max(1) as f64;
    let mut all = BTreeMap::new();
    for end in ["source", "destination"] {
        for (name, cost) in hop.stages(end) {
            if !SHARED.contains(&name.as_str()) && cost > 0.0 {
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
        let cost = hop.cpu(end).filter(|cost| cost.median > 0.0)?;
        bounds.push((cpus / cost.median * GBIT, name.to_owned()));
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
        let run = json!({"seconds": 1.0, "source-cpu": 2.0, "destination-cpu": 1.0,
            "source-stages": {"compress": 1.5, "intake": 0.5},
            "destination-stages": {"deliver": 0.25}});
        let samples = json!({"hop": [{"channels": 0, "codec": "zstd", "tls": true, "ratio": 2.0,
            "plain": 1_u64 << 30, "each": [run]}]});
        let all = hops(&samples);
        let bound = |link, cpus| fastest(&all[0], link, cpus).unwrap();
        assert_eq!(bound(1.0, 16.0), (2.0, "the link".to_owned()));
        assert_eq!(bound(100.0, 2.0), (GBIT, "the sender's CPUs".to_owned()));
        assert_eq!(bound(100.0, 64.0), (2.0 * GBIT, "the thread intake".to_owned()));
    }
}
