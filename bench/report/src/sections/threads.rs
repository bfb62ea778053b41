//! The patch series on lock-free threads: its six tables, old scheme against ours.

use serde_json::Value;

use crate::data::{each, number, numbers, text, Data};
use crate::figure::{bars, Bar, Kind};
use crate::section::{Finding, Section, Table};
use crate::spread::{grouped, Spread};

/// Threads, wait, then before and after: total ms (none: it did not complete), busy ratio.
type Case = (u64, bool, [Option<f64>; 2], [f64; 2]);
const DOCUMENT: [Case; 6] = [
    (4, false, [Some(247_371.0), Some(138_326.0)], [0.54, 0.55]),
    (4, true, [None, Some(338_692.0)], [0.0, 0.0]),
    (8, false, [Some(427_384.0), Some(125_066.0)], [0.19, 0.38]),
    (8, true, [None, Some(164_426.0)], [0.0, 0.0]),
    (16, false, [Some(2_317_123.0), Some(149_006.0)], [0.02, 0.02]),
    (16, true, [Some(1_792_817.0), Some(161_423.0)], [0.0, 0.0]),
];
/// Main thread, then least and most of the compression threads, per cent of a CPU.
const CPU: [[[f64; 3]; 2]; 6] = [
    [[66.2, 32.4, 36.8], [56.5, 59.4, 60.9]],
    [[55.1, 51.0, 63.3], [99.9, 99.9, 99.9]],
    [[43.3, 17.5, 32.5], [54.5, 54.5, 56.8]],
    [[96.3, 2.3, 46.8], [90.6, 90.6, 91.8]],
    [[56.2, 6.2, 56.2], [37.8, 37.8, 40.2]],
    [[48.3, 1.7, 31.0], [43.9, 42.1, 45.6]],
];

const CLAIM: &str =
    "Rings without locks are faster than the scheme before, at each number of threads.";
const STATED: &str = "1.79 to 15.55 times as fast";

const HEAD: [&str; 7] = [
    "threads, wait",
    "scheme",
    "total ms",
    "before / this",
    "busy ratio",
    "main thread CPU %",
    "workers CPU %",
];

pub(crate) fn section(data: &Data) -> Section {
    let mut section = Section::new("threads", "Lock-free threads (document 003)", &["pool"]);
    section.text(
        "The patch series of 2018 replaces QEMU's compression threads, which take one request \
         each under locks, by rings without locks: 16 virtual CPUs, 120 GB of memory that is \
         written all the time, two hosts of 64 CPUs. The scheme before it came back later and \
         stayed until QEMU 9.0.",
    );
    section.table(document());
    match data.samples("pool") {
        Ok(samples) => here(&mut section, samples),
        Err(why) => {
            section.missing(format!("No comparison of the schemes: {why}."));
            section.findings(vec![Finding::open(CLAIM, "It was not measured.").document(STATED)]);
        }
    }
    section.compare(
        &[
            "the scheme before, written again with its locks and conditions",
            "4, 8 and 16 threads, compress-wait-thread on and off, four requests a thread, zlib 1",
        ],
        &[
            "The pages are compressed once and go over a link that is a timer. The document \
             migrates a VM that writes, where a slower scheme also has more pages to send: its \
             ratios are larger.",
            "The machine has fewer CPUs than threads: threads share them, so the total time of \
             both schemes is near the CPU time of the codec.",
            "platen takes batches of 128 pages; the row \"single pages\" is the document's own \
             way on platen's rings.",
        ],
    );
    section
}

fn wait(on: bool) -> &'static str {
    if on {
        "on"
    } else {
        "off"
    }
}

fn document() -> Table {
    let mut table = Table::new("The document", &HEAD);
    for ((threads, waits, totals, busy), cpu) in DOCUMENT.iter().zip(CPU) {
        for (nth, scheme) in ["before", "after"].into_iter().enumerate() {
            let total = totals[nth].map_or("did not complete".into(), |ms| grouped(ms, 0));
            let ratio = match (nth, totals) {
                (1, [Some(before), Some(after)]) => format!("{:.2}", before / after),
                _ => "–".into(),
            };
            let [main, least, most] = cpu[nth];
            let cells = vec![
                format!("{threads}, {}", wait(*waits)),
                scheme.to_owned(),
                total,
                ratio,
                format!("{:.2}", busy[nth]),
                format!("{main:.1}"),
                format!("{least:.1} to {most:.1}"),
            ];
            table.row(Some(Kind::Document), cells);
        }
    }
    table
}

fn here(section: &mut Section, samples: &Value) {
    let link = number(samples, "/table/link_gbit").unwrap_or(0.0);
    let codec = text(samples, "/table/codec");
    let mib = number(samples, "/bytes").unwrap_or(0.0) / f64::from(1 << 20);
    let caption = format!(
        "Here: {codec}, {mib:.0} MiB of {}, a link of {link} Gbit/s",
        text(samples, "/data")
    );
    let mut table = Table::new(caption, &HEAD);
    let mut unpack = Table::new("Here: decompression without a link", &HEAD);
    let mut faster = Vec::new();
    for (threads, waits, totals, _) in DOCUMENT {
        if let [Some(before), Some(after)] = totals {
            let label = format!("document: {threads} threads, wait {}", wait(waits));
            faster.push(Bar::new(label, Kind::Document, Spread::one(before / after)));
        }
    }
    let mut slower = 0;
    for row in each(samples, "/table/rows") {
        let (direction, scheme) = (text(row, "/direction"), text(row, "/scheme"));
        let (threads, waits) =
            (number(row, "/threads").unwrap_or(0.0), row["compress_wait_thread"] == true);
        let total = Spread::of(numbers(each(row, "/total_ms_runs"), ""))
            .or_else(|| number(row, "/total_ms").map(Spread::one));
        let ratio = number(row, "/before_over_this");
        let of = |field: &str, digits| {
            number(row, field).map_or("–".to_owned(), |value| grouped(value, digits))
        };
        let workers = ["/worker_cpu_percent_min", "/worker_cpu_percent_max"].map(|at| of(at, 1));
        let cells = vec![
            format!("{threads:.0}, {}", wait(waits)),
            scheme.clone(),
            super::moves::cell(total, 0),
            ratio.map_or("–".into(), |ratio| format!("{ratio:.2}")),
            of("/busy_rate", 2),
            of("/submitter_cpu_percent", 1),
            workers.join(" to "),
        ];
        let kind = if scheme == "before" { Kind::Other } else { Kind::Platen };
        let compresses = direction == "compress";
        if compresses { &mut table } else { &mut unpack }.row(Some(kind), cells);
        if let Some(ratio) = ratio.filter(|_| compresses && scheme == "after, 128 pages") {
            slower += u32::from(ratio < 1.0);
            let label = format!("platen: {threads:.0} threads, wait {}", wait(waits));
            faster.push(Bar::new(label, Kind::Platen, Spread::one(ratio)));
        }
    }
    section.table(table);
    section.table(unpack);
    let ours = faster.iter().filter(|bar| bar.kind == Kind::Platen);
    let range = Spread::of(ours.map(|bar| bar.spread.median));
    section.figures([bars("Total time before, of that after", "times as fast", 2, &faster)]);
    section.findings(vec![match range {
        None => Finding::open(CLAIM, "The table is missing."),
        Some(range) => {
            let measured = range.runs;
            let found = format!("platen's pool was slower in {slower} of {measured} cases here.");
            Finding::of(CLAIM, found, slower == 0)
                .here(format!("{:.2} to {:.2} times as fast", range.least, range.most))
        }
    }
    .document(STATED)]);
}
