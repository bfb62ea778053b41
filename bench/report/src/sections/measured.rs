//! The files of `scripts/bench-threads`: curves over threads, beside the rates that the model of
//! the section on scaling computes from the costs of one thread on the same machine.

use serde_json::Value;

use super::moves::cell;
use super::scaling::{cost, serial};
use super::stages::{hops, Hop};
use crate::data::{each, number, numbers, text, Data};
use crate::section::Table;
use crate::spread::{grouped, Spread};

/// GB in a GiB.
const GB: f64 = 1.073_741_824;

/// All tables; `None` without samples.
pub(crate) fn markdown(data: &Data) -> Option<String> {
    let cpus = number(data.samples("pool").ok()?, "/cpus")?;
    let relays = hops(data.samples("hop").ok()?);
    let links = hops(data.samples("links").ok()?);
    let auto = hops(data.samples("auto").ok()?);
    let tables = [
        by_threads(&relays, cpus),
        by_links(&links, &auto, cpus),
        jobs(data.samples("jobs").ok()?),
        old_threads(data.samples("pool").ok()?),
        old_threads(data.samples("pool-10g").ok()?),
        unpack(data.samples("pool-10g").ok()?),
        bare(data.samples("overhead").ok()?),
    ];
    Some(tables.map(|table| table.markdown()).join("\n"))
}

/// The rate, GB/s, that the model computes from the costs in `base` for this many codec threads
/// with both relays and the benchmark on `cpus` CPUs, and the limit that it names.
fn computed(base: &Hop<'_>, threads: Option<u64>, cpus: f64) -> Option<(f64, String)> {
    let all = cost(base, "source")? + cost(base, "destination")? + base.players()?.median;
    let mut bounds = vec![(cpus / all, "all CPUs".to_owned())];
    for (end, name) in [("source", "compress"), ("destination", "decompress")] {
        let each = base.stages(end).get(name).copied().filter(|cost| *cost > 0.0);
        bounds
            .extend(threads.zip(each).map(|(count, cost)| (count as f64 / cost, name.to_owned())));
    }
    bounds.extend(serial(base).into_iter().map(|(name, cost)| (1.0 / cost, name)));
    let (rate, limit) = bounds.into_iter().min_by(|one, other| one.0.total_cmp(&other.0))?;
    Some((rate * GB, limit))
}

/// The cells for the computed rate, the measured one as a part of it, and the computed limit.
fn compared(hop: &Hop<'_>, model: Option<(f64, String)>) -> [String; 3] {
    match model.zip(hop.speed()) {
        Some(((rate, limit), speed)) => [grouped(rate, 2), grouped(speed.median / rate, 2), limit],
        None => ["–"; 3].map(String::from),
    }
}

/// The cells that each row of the relays ends with.
fn used(hop: &Hop<'_>) -> [String; 4] {
    let busiest = hop.busiest().map(|(name, share)| format!("{name} {:.0} %", share * 100.0));
    [
        cell(hop.cpu("source"), 2),
        cell(hop.cpu("destination"), 2),
        busiest.unwrap_or_else(|| "–".to_owned()),
        hop.busy().map_or("–".to_owned(), |busy| grouped(busy.median, 1)),
    ]
}

fn streams(hop: &Hop<'_>) -> String {
    match hop.channels {
        0 => "1".to_owned(),
        channels => format!("1 + {channels}"),
    }
}

fn shown(count: Option<u64>) -> String {
    count.map_or("–".to_owned(), |count| count.to_string())
}

/// The columns of a row beside those that name it.
const COMPARED: [&str; 8] = [
    "GB/s",
    "computed",
    "measured / computed",
    "computed limit",
    "sender, CPU s/GiB",
    "receiver, CPU s/GiB",
    "busiest thread",
    "CPUs busy",
];

fn by_threads(hops: &[Hop<'_>], cpus: f64) -> Table {
    let head = [&["streams", "codec", "codec threads"][..], &COMPARED].concat();
    let mut table = Table::new("Both relays, TLS, 8 links", &head);
    for hop in hops {
        let one = hops.iter().find(|one| {
            (one.channels, &one.codec, one.threads) == (hop.channels, &hop.codec, Some(1))
        });
        let model = one.and_then(|one| computed(one, hop.threads, cpus));
        let first = [streams(hop), hop.codec.clone(), shown(hop.threads), cell(hop.speed(), 2)];
        let cells = [&first[..], &compared(hop, model), &used(hop)].concat();
        table.row(None, cells);
    }
    table
}

fn by_links(links: &[Hop<'_>], auto: &[Hop<'_>], cpus: f64) -> Table {
    let head = [&["streams", "codec", "codec threads", "links"][..], &COMPARED].concat();
    let mut table = Table::new("Both relays, TLS, by the number of links", &head);
    for hop in links.iter().chain(auto) {
        // The model has a link for each stream, and knows nothing of what auto chooses.
        let is_modelled = hop.codec == "none" && hop.links == Some(hop.channels.max(1));
        let model = is_modelled.then(|| computed(hop, hop.threads, cpus)).flatten();
        let first = [streams(hop), hop.codec.clone(), shown(hop.threads), shown(hop.links)];
        let speed = [cell(hop.speed(), 2)];
        table.row(None, [&first[..], &speed, &compared(hop, model), &used(hop)].concat());
    }
    table
}

fn jobs(samples: &Value) -> Table {
    let head = [
        "pattern",
        "codec",
        "jobs",
        "MB/s",
        "of one job, times the jobs",
        "CPU µs a page",
        "CPUs busy",
        "p50 µs",
        "p99 µs",
    ];
    let mut table = Table::new("Compressed memory, 4 KiB at random, by jobs", &head);
    let rows = each(samples, "/results").iter().flat_map(|part| each(part, "/rows"));
    let mut one_job = None;
    for row in rows.filter(|row| text(row, "/pattern").ends_with("at random")) {
        let of = |field: &str| Spread::of(numbers(each(row, "/runs"), &format!("/{field}")));
        let count = number(row, "/jobs").unwrap_or(0.0);
        let rate = of("mb_s").map(|spread| spread.median);
        if count == 1.0 {
            one_job = rate;
        }
        let part = rate.zip(one_job).map(|(rate, one)| rate / one / count);
        table.row(
            None,
            vec![
                text(row, "/pattern"),
                text(row, "/front"),
                grouped(count, 0),
                cell(of("mb_s"), 0),
                part.map_or("–".to_owned(), |part| grouped(part, 2)),
                cell(of("cpu"), 1),
                of("cores").map_or("–".to_owned(), |cores| grouped(cores.median, 1)),
                cell(of("p50"), 1),
                cell(of("p99"), 1),
            ],
        );
    }
    table
}

/// The rows of a file of `platen-bench pool` of one direction, a case after the other: the old
/// scheme, single pages, batches.
fn cases<'a>(samples: &'a Value, direction: &str) -> Vec<[&'a Value; 3]> {
    let rows = each(samples, "/table/rows").iter();
    let rows: Vec<&Value> = rows.filter(|row| text(row, "/direction") == direction).collect();
    rows.chunks_exact(3).map(|case| [case[0], case[1], case[2]]).collect()
}

fn total(row: &Value) -> String {
    cell(Spread::of(numbers(each(row, "/total_ms_runs"), "")), 0)
}

fn faster(row: &Value) -> String {
    number(row, "/before_over_this").map_or("–".to_owned(), |ratio| grouped(ratio, 2))
}

fn old_threads(samples: &Value) -> Table {
    let head = [
        "threads, wait",
        "before, ms",
        "single pages, ms",
        "batches, ms",
        "before / batches",
        "busy ratio: before, batches",
        "main thread CPU %: before, batches",
        "workers CPU %: before",
        "batches",
    ];
    let link = number(samples, "/table/link_gbit").unwrap_or(0.0);
    let mib = number(samples, "/bytes").unwrap_or(0.0) / f64::from(1 << 20);
    let caption = format!("The scheme before and platen's, zlib 1, {mib:.0} MiB, {link} Gbit/s");
    let mut table = Table::new(caption, &head);
    for [before, pages, batches] in cases(samples, "compress") {
        let wait = if before["compress_wait_thread"] == true { "on" } else { "off" };
        let both = |field: &str, digits| {
            let of = |row| number(row, field).map_or("–".into(), |value| grouped(value, digits));
            format!("{}, {}", of(before), of(batches))
        };
        let workers = |row| {
            let of = |at| number(row, at).map_or("–".into(), |value| grouped(value, 0));
            format!("{} to {}", of("/worker_cpu_percent_min"), of("/worker_cpu_percent_max"))
        };
        let threads = number(before, "/threads").unwrap_or(0.0);
        table.row(
            None,
            vec![
                format!("{threads:.0}, {wait}"),
                total(before),
                total(pages),
                total(batches),
                faster(batches),
                both("/busy_rate", 2),
                both("/submitter_cpu_percent", 0),
                workers(before),
                workers(batches),
            ],
        );
    }
    table
}

fn unpack(samples: &Value) -> Table {
    let head = [
        "threads",
        "before, ms",
        "single pages, ms",
        "batches, ms",
        "before / batches",
        "main thread CPU %: before",
        "single pages",
        "batches",
    ];
    let mut table = Table::new("Decompression, without a link", &head);
    for case in cases(samples, "decompress") {
        let main = case.map(|row| {
            number(row, "/submitter_cpu_percent").map_or("–".into(), |value| grouped(value, 0))
        });
        let threads = number(case[0], "/threads").unwrap_or(0.0);
        let first = [format!("{threads:.0}")];
        let cells = [&first[..], &case.map(total), &[faster(case[2])], &main].concat();
        table.row(None, cells);
    }
    table
}

fn bare(samples: &Value) -> Table {
    let head = [
        "codec",
        "bytes of a batch",
        "workers, ring",
        "a bare loop, CPU s/GiB",
        "CPU of the pool, of the loops'",
        "time of the pool, of the loops'",
    ];
    let caption = "The pool beside as many bare loops around the codec as it has workers";
    let mut table = Table::new(caption, &head);
    for row in each(samples, "/overhead") {
        let of = |field: &str, digits| {
            number(row, field).map_or("–".to_owned(), |value| grouped(value, digits))
        };
        table.row(
            None,
            vec![
                text(row, "/codec"),
                of("/batch_bytes", 0),
                format!("{}, {}", of("/workers", 0), of("/ring_capacity", 0)),
                of("/bare_cpu_seconds_per_gib", 2),
                of("/cpu_ratio", 2),
                of("/wall_ratio", 2),
            ],
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_model_counts_codec_threads_and_the_cpus_that_both_ends_share() {
        let run = json!({"seconds": 2.0, "cpu": 6.0, "source-cpu": 4.0, "destination-cpu": 2.0,
            "bench-cpu": 1.0, "bench-busiest": 0.5,
            "source-stages": {"compress": 3.0, "intake": 0.5}, "source-busiest": {"compress": 1.8},
            "destination-stages": {"decompress": 1.5}, "destination-busiest": {"decompress": 0.9}});
        let row = json!({"channels": 0, "codec": "zstd", "tls": true, "ratio": 2.0, "threads": 1,
            "links": 1, "plain": 1_u64 << 30, "each": [run]});
        let samples = json!({"hop": [row]});
        let all = hops(&samples);
        let rate = |threads, cpus| {
            let (rate, limit) = computed(&all[0], Some(threads), cpus).unwrap();
            (grouped(rate / GB, 3), limit)
        };
        assert_eq!(rate(1, 16.0), ("0.333".into(), "compress".into()));
        assert_eq!(rate(16, 7.0), ("1.000".into(), "all CPUs".into()));
        assert_eq!(rate(16, 64.0), ("2.000".into(), "intake".into()));
        assert_eq!(all[0].busiest(), Some(("compress (source)".into(), 0.9)));
        assert_eq!(all[0].busy().unwrap().median, 3.5);
    }
}
