//! The QZRAM paper: tables 1 and 2, and figure 7; figures 8 to 11 are in modules of their own.

use serde_json::Value;

use super::{qzram_jobs, qzram_redis};
use crate::data::{each, number, numbers, text, Data};
use crate::figure::{bars, lines, Axes, Bar, Figure, Kind, Line};
use crate::section::{Finding, Section, Table};
use crate::spread::Spread;

/// Algorithm, MiB/s and CPU in per cent of reads and of writes, ratio.
const TABLE_1: [(&str, [f64; 5]); 3] = [
    ("LZO", [1588.0, 670.0, 60.2, 55.1, 1.49]),
    ("LZ4", [1973.0, 723.0, 78.57, 86.36, 1.51]),
    ("DEFLATE", [588.0, 65.5, 90.57, 96.99, 2.25]),
];

/// The columns of the pages: times first, then ratios.
const PAGE_FIELDS: [&str; 8] = [
    "write_cpu",
    "write_p50",
    "write_p99",
    "read_cpu",
    "read_p50",
    "read_p99",
    "coded",
    "compacted",
];

pub(crate) fn section(data: &Data) -> Section {
    let steps = &["pages", "requests", "jobs", "redis"];
    let mut section = Section::new("qzram", "Compressed memory (document 002, QZRAM)", steps);
    section.text(
        "The paper puts a QAT card (C62x) under Linux 4.8's zram and compares it with zram by \
         fio, with Calgary's files, on 88 cores. Its figures exist as drawings only, so the page \
         has those of its numbers that its tables and text state.",
    );
    section.heading("Tables 1 and 2: ratio and CPU by algorithm");
    section.table(document());
    match data.samples("pages") {
        Ok(samples) => pages(&mut section, samples),
        Err(why) => {
            section.missing(format!("No pages beside zram: {why}."));
            section.findings(vec![room(None, None)]);
        }
    }
    section.heading("Figure 7: requests from 4 KiB to 4 MiB");
    match data.samples("requests") {
        Ok(samples) => requests(&mut section, samples),
        Err(why) => {
            section.missing(format!("No requests by size: {why}."));
            section.findings(vec![direct(&Value::Null)]);
        }
    }
    qzram_jobs::add(&mut section, data);
    qzram_redis::add(&mut section, data);
    section.compare(
        &[
            "the kernel's zram with LZO and LZ4 beside it, pages of 4 KiB, in turns",
            "direct against asynchronous offload over the size of requests; 1 to 16 jobs; four \
             patterns",
            "redis beyond its memory: no swap, zram, platen, platen on QAT",
        ],
        &[
            "platen is a device outside the kernel. These parts run it in the benchmark's own \
             process, without a transport; the redis guests use ublk.",
            "The QAT device is simulated, and its own threads are not in the CPU time.",
            "The paper's CPU is in per cent of an unstated whole. Here it is microseconds for a \
             page of 4 KiB, all threads included.",
            "The kernel is many releases newer than 4.8: its zram works on as many threads as \
             there are CPUs, which the paper's did not.",
        ],
    );
    section
}

fn document() -> Table {
    let head = ["", "read MiB/s", "write MiB/s", "read CPU %", "write CPU %", "ratio"];
    let mut table =
        Table::new("The paper: zram by fio; QZRAM's row is of table 2 and of the text", &head);
    for (name, figures) in TABLE_1 {
        let cells = figures.iter().map(|figure| Spread::one(*figure).show(2));
        table.row(Some(Kind::Document), std::iter::once(name.to_owned()).chain(cells).collect());
    }
    let qzram = ["QZRAM (GZIP on QAT)", "611", "about 670", "21.60", "18.50", "2.25"];
    table.row(Some(Kind::Document), qzram.map(String::from).to_vec());
    table
}

fn pages(section: &mut Section, samples: &Value) {
    let head = [
        "",
        "write CPU µs",
        "write p50",
        "write p99",
        "read CPU µs",
        "read p50",
        "read p99",
        "ratio of data",
        "ratio in memory",
    ];
    let mut figures = Vec::new();
    let (mut zram, mut deflate, mut any_zram) = (None, None, false);
    for part in each(samples, "/results").iter().filter(|part| text(part, "/part") == "pages") {
        let set = crate::data::set_name(&text(part, "/set"));
        let mut ratios = vec![
            Bar::new("paper: zram LZO (Calgary)", Kind::Document, Spread::one(1.49)),
            Bar::new("paper: QZRAM (Calgary)", Kind::Document, Spread::one(2.25)),
        ];
        let mut costs = Vec::new();
        (zram, deflate) = (None::<f64>, None);
        let caption = format!("Here: {set}; microseconds for a page of 4 KiB");
        let mut table = Table::new(caption, &head);
        for front in each(part, "/fronts") {
            let name = text(front, "/front");
            let runs = each(front, "/runs");
            let of = |field: &str| Spread::of(numbers(runs, &format!("/{field}")));
            let kind = if name.starts_with("zram") { Kind::Other } else { Kind::Platen };
            let label = if kind == Kind::Other { name.clone() } else { format!("platen {name}") };
            any_zram |= kind == Kind::Other;
            let cells = PAGE_FIELDS.iter().map(|field| {
                super::moves::cell(of(field), if field.starts_with("co") { 2 } else { 1 })
            });
            table.row(Some(kind), std::iter::once(label.clone()).chain(cells).collect());
            let Some(coded) = of("coded") else { continue };
            match kind {
                Kind::Other => zram = Some(zram.unwrap_or(0.0).max(coded.median)),
                _ if name.starts_with("zlib") => deflate = Some(coded.median),
                _ => {}
            }
            ratios.push(Bar::new(&label, kind, coded));
            costs.extend(of("write_cpu").map(|cost| Bar::new(&label, kind, cost)));
        }
        section.table(table);
        figures.push(bars(
            &format!("Plain bytes by the compressed byte: {set}"),
            "ratio",
            2,
            &ratios,
        ));
        figures.push(bars(&format!("CPU of a written page: {set}"), "µs", 1, &costs));
    }
    if !any_zram {
        section.missing("The kernel's zram was not measured: it needs root and the module zram.");
    }
    section.figures(figures);
    section.text(
        "Calgary's files are 3 MB: each class of sizes has a slab that is half empty, and the \
         start of each store is a good part of its cost. Their ratio of data is comparable, their \
         memory and CPU are not.",
    );
    section.findings(vec![room(zram, deflate)]);
}

/// The ratios of zram's best and of platen's zlib.
fn room(zram: Option<f64>, deflate: Option<f64>) -> Finding {
    let claim = "DEFLATE takes 1.51 times the memory of zram's default into the same room.";
    let finding = match (zram, deflate) {
        (Some(zram), Some(deflate)) if zram > 0.0 => {
            let gain = deflate / zram;
            let found =
                format!("zlib 1 has {gain:.2} times the ratio of zram's best of LZO and LZ4.");
            Finding::of(claim, found, gain > 1.4).here(format!("{gain:.2} times, by platen"))
        }
        _ => Finding::open(claim, "zram or zlib was not measured."),
    };
    finding.document("1.51 times")
}

/// Figure 7, in both scenes of the simulated device.
fn requests(section: &mut Section, samples: &Value) {
    let parts = each(samples, "/results").iter();
    for part in parts.filter(|part| text(part, "/part") == "qat") {
        let simulated = part["simulated"].as_bool().unwrap_or(true);
        for scene in each(part, "/scenes") {
            let device = text(scene, "/device");
            let head = ["request", "way", "MB/s", "CPU µs a page", "p50 µs", "p99 µs", "ratio"];
            let mut table = Table::new(format!("Here: {device}"), &head);
            let mut speed = Vec::new();
            let mut cost = Vec::new();
            for result in each(scene, "/results") {
                let size = number(result, "/request_kib").unwrap_or(0.0);
                for way in each(result, "/ways") {
                    add_way(&mut table, &mut speed, &mut cost, size, way, simulated);
                }
            }
            section.table(table);
            let axes = |y| Axes { x: "size of a request, KiB", y, doubling: true };
            let is_waiting = device.contains("without compression");
            let figures: [Option<Figure>; 2] = [
                lines(&format!("Writes: {device}"), axes("MB/s"), &speed),
                lines(&format!("CPU of a written page: {device}"), axes("µs"), &cost),
            ];
            let [speed, cost] = figures;
            // Each scene is for one of the two.
            section.figures([if is_waiting { speed } else { cost }]);
        }
    }
    section.findings(vec![direct(samples)]);
}

fn add_way(
    table: &mut Table,
    speed: &mut Vec<Line>,
    cost: &mut Vec<Line>,
    size: f64,
    way: &Value,
    simulated: bool,
) {
    let name = text(way, "/way");
    let runs = each(way, "/runs");
    let of = |field: &str| Spread::of(numbers(runs, &format!("/{field}")));
    let by_device = name.starts_with("QAT") && simulated;
    let kind = match (by_device, name.starts_with("zram")) {
        (true, _) => Kind::Simulated,
        (_, true) => Kind::Other,
        _ => Kind::Platen,
    };
    let mut cells = vec![format!("{size:.0} KiB"), name.clone()];
    let digits = [("mb_s", 0), ("cpu", 2), ("p50", 0), ("p99", 0), ("coded", 2)];
    cells.extend(digits.map(|(field, digits)| super::moves::cell(of(field), digits)));
    table.row(Some(kind), cells);
    for (lines, field) in [(speed, "mb_s"), (cost, "cpu")] {
        let Some(spread) = of(field) else { continue };
        match lines.iter_mut().find(|line| line.label == name) {
            Some(line) => line.points.push((size, spread)),
            None => lines.push(Line {
                label: name.clone(),
                simulated: by_device,
                points: vec![(size, spread)],
            }),
        }
    }
}

/// The paper's finding on direct offload.
fn direct(samples: &Value) -> Finding {
    let claim =
        "Direct offload has less than a tenth of zram's throughput; asynchronous offload has more \
                 than zram.";
    let parts = each(samples, "/results").iter();
    let scenes = parts.flat_map(|part| each(part, "/scenes"));
    let waiting = scenes.filter(|scene| text(scene, "/device").contains("without compression"));
    let first = waiting.flat_map(|scene| each(scene, "/results")).next();
    let speed = |name: &str| {
        let way = each(first?, "/ways").iter().find(|way| text(way, "/way").starts_with(name))?;
        Some(Spread::of(numbers(each(way, "/runs"), "/mb_s"))?.median)
    };
    let finding = match (speed("QAT, direct"), speed("QAT, asynchronous"), speed("zram")) {
        (Some(direct), Some(asynchronous), Some(zram)) if zram > 0.0 => {
            let found = format!(
                "With requests of 4 KiB and a SIMULATED device that only answers late, direct \
                 offload has {:.2} of zram's throughput, asynchronous offload {:.1} times zram's.",
                direct / zram,
                asynchronous / zram
            );
            let (late, many) = (direct / zram, asynchronous / zram);
            Finding::of(claim, found, late < 0.1 && many > 1.0)
                .here(format!("{late:.2} and {many:.1} times, SIMULATED"))
        }
        _ => Finding::open(claim, "zram or the simulated device was not measured."),
    };
    finding.document("less than 0.1, and more than 1 times")
}
