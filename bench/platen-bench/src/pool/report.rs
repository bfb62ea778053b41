//! The tables, as text and as JSON.

use pages::PAGE_SIZE;
use serde_json::{json, Value};

use super::data::Pages;
use super::measure::cpus;
use super::overhead;
use super::table::{self, Plan, Scheme, Way};

pub(super) fn header(pages: &Pages, runs: u32) {
    println!(
        "{}: {} pages of {PAGE_SIZE} bytes; medians of {runs} interleaved runs; {} CPUs",
        pages.name,
        pages.bytes.len() / PAGE_SIZE,
        cpus()
    );
}

pub(super) fn overhead(rows: &[overhead::Row]) {
    println!();
    println!("The pool over a bare codec loop (as many loops beside each other as workers)");
    println!(
        "{:<5} {:>7} {:>7} {:>4} {:>10} {:>9} {:>6} {:>6} {:>9} {:>15} {:>8}",
        "",
        "batch",
        "",
        "",
        "bare CPU",
        "CPU over",
        "",
        "wall",
        "submitter",
        "futex per 1,000",
        "futex,"
    );
    println!(
        "{:<5} {:>7} {:>7} {:>4} {:>10} {:>9} {:>6} {:>6} {:>9} {:>15} {:>8}",
        "codec",
        "bytes",
        "workers",
        "ring",
        "s/GiB",
        "bare",
        "goal",
        "ratio",
        "share",
        "busy (least)",
        "waiting"
    );
    for row in rows {
        let goal =
            row.case.goal.map_or("-".into(), |goal| format!("{:+.0} %", (goal - 1.0) * 100.0));
        println!(
            "{:<5} {:>7} {:>7} {:>4} {:>10.3} {:>+7.1} % {:>6} {:>6.3} {:>7.1} % {:>15} {:>8.1}",
            row.case.codec.to_string(),
            row.case.batch,
            row.case.threads,
            row.case.ring_capacity,
            row.bare_cpu,
            (row.cpu_ratio - 1.0) * 100.0,
            goal,
            row.wall_ratio,
            row.submitter * 100.0,
            row.futex_busy
                .map_or("-".into(), |(median, least)| format!("{median:.1} ({least:.1})")),
            row.futex_waiting,
        );
    }
    println!("{FUTEX_NOTE}");
}

const FUTEX_NOTE: &str = "\
CPU, wall, submitter: with compress-wait-thread on; the submitter, being faster than the workers,
sleeps until a quarter of what the rings hold is left. Each sleep is a futex wait and a wake:
`waiting`, per 1,000 batches. The other count is taken while both sides are busy:
compress-wait-thread off, and a submitter that is given back what finds no room, and asks again. It
never sleeps, and workers run dry only when another process has its CPU, so the least of the runs
is free of that (goal: fewer than 5). `-`: with a worker on each CPU it would be the submitter that
has theirs, and not all can be busy. The calls are counted where they are made. From outside:
  strace -c -f -e trace=futex platen-bench pool --only overhead";

pub(super) fn overhead_json(rows: &[overhead::Row]) -> Value {
    let row = |row: &overhead::Row| {
        json!({
            "codec": row.case.codec.to_string(),
            "batch_bytes": row.case.batch,
            "workers": row.case.threads,
            "ring_capacity": row.case.ring_capacity,
            "bare_cpu_seconds_per_gib": row.bare_cpu,
            "cpu_ratio": row.cpu_ratio,
            "cpu_ratio_goal": row.case.goal,
            "wall_ratio": row.wall_ratio,
            "submitter_share": row.submitter,
            "futex_per_1000_batches_busy": row.futex_busy.map(|(median, _)| median),
            "futex_per_1000_batches_busy_least": row.futex_busy.map(|(_, least)| least),
            "futex_per_1000_batches_waiting": row.futex_waiting,
        })
    };
    rows.iter().map(row).collect()
}

fn scheme_name(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Old => "before",
        Scheme::Pages => "after, single pages",
        Scheme::Batches => "after, 128 pages",
    }
}

pub(super) fn table(plan: &Plan, rows: &[table::Row]) {
    let link = match plan.link_gbit {
        0.0 => "no link".to_owned(),
        gbit => format!("a link of {gbit} Gbit/s"),
    };
    println!();
    println!(
        "The pool (after) and QEMU's old threads (before): {} {}, {link}",
        plan.settings.codec(),
        plan.settings.level()
    );
    let mut head = None;
    for row in rows {
        if head != Some((row.way, row.threads)) {
            head = Some((row.way, row.threads));
            let way = match row.way {
                Way::Compress { wait: false } => "compress-wait-thread = off",
                Way::Compress { wait: true } => "compress-wait-thread = on",
                Way::Decompress => "decompression, no link",
            };
            println!();
            println!("{} threads, {way}", row.threads);
            println!(
                "{:<20} {:>10} {:>8} {:>9} {:>10} {:>14} {:>9} {:>9}",
                "", "total ms", "before/", "busy-rate", "submitter", "workers", "CPU ms", "MB sent"
            );
        }
        println!(
            "{:<20} {:>10.1} {:>7.2}x {:>9.2} {:>8.1} % {:>12} % {:>9.1} {:>9.1}",
            scheme_name(row.scheme),
            row.total_ms,
            row.faster,
            row.busy_rate,
            row.submitter,
            format!("{:.1}~{:.1}", row.workers.0, row.workers.1),
            row.cpu_ms,
            row.sent / 1e6,
        );
    }
}

pub(super) fn table_json(plan: &Plan, rows: &[table::Row]) -> Value {
    let row = |row: &table::Row| {
        let (direction, wait) = match row.way {
            Way::Compress { wait } => ("compress", wait),
            Way::Decompress => ("decompress", true),
        };
        json!({
            "direction": direction,
            "compress_wait_thread": wait,
            "threads": row.threads,
            "scheme": scheme_name(row.scheme),
            "total_ms": row.total_ms,
            "before_over_this": row.faster,
            "busy_rate": row.busy_rate,
            "submitter_cpu_percent": row.submitter,
            "worker_cpu_percent_min": row.workers.0,
            "worker_cpu_percent_max": row.workers.1,
            "cpu_ms": row.cpu_ms,
            "bytes_sent": row.sent,
            "total_ms_runs": row.total_ms_runs,
            "cpu_ms_runs": row.cpu_ms_runs,
        })
    };
    json!({
        "codec": plan.settings.codec().to_string(),
        "level": plan.settings.level(),
        "link_gbit": plan.link_gbit,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}
