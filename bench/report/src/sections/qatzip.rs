//! QEMU's document on QATzip: none, zstd and QATzip over 8 channels; memory; how to choose.

use serde_json::Value;

use super::moves::{cell, circumstances, link, moves, named, Moves};
use super::stages::memory;
use crate::data::{number, Data};
use crate::figure::{bars, Bar, Kind};
use crate::section::{Finding, Section, Table};
use crate::spread::Spread;

/// Name, total ms, downtime ms, Mbit/s, pages a second, CPU of sender and receiver in per cent.
const DOCUMENT: [(&str, [f64; 6]); 3] = [
    ("qatzip (4 QAT devices)", [16630.0, 28.0, 10467.0, 2_940_235.0, 160.0, 360.0]),
    ("zstd", [20165.0, 24.0, 8579.0, 2_391_465.0, 810.0, 340.0]),
    ("none", [46063.0, 40.0, 10848.0, 330_240.0, 45.0, 85.0]),
];
/// Channels, and MB that sender and receiver reserve for a QAT device.
const MEMORY: [(f64, f64, f64); 3] = [(2.0, 10.0, 10.0), (4.0, 12.0, 14.0), (8.0, 16.0, 20.0)];

const HEAD: [&str; 8] = [
    "",
    "total s",
    "downtime ms",
    "Mbit/s",
    "pages/s",
    "MB sent",
    "sender CPU %",
    "receiver CPU %",
];

pub(crate) fn section(data: &Data) -> Section {
    let steps = &["channels", "links", "hop"];
    let mut section = Section::new("qatzip", "Compression by QATzip (document 000)", steps);
    section.text(
        "QEMU's document compares a migration without compression, with zstd and with QATzip on \
         QAT devices, over 8 multifd channels and 10 Gbit/s: 16 virtual CPUs, 64 GB of memory, 54 \
         GB of it Silesia data, and 4 QAT devices.",
    );
    section.table(document());
    match data.samples("channels") {
        Ok(samples) => channels(&mut section, samples),
        Err(why) => section.missing(format!("No migrations by channels: {why}.")),
    }
    section.compare(
        &[
            "8 multifd channels, and 2, but for the rows named \"1 stream\"",
            "QEMU's own none and zstd",
            "a link that is slower than the memory",
        ],
        &[
            "The rows named \"1 stream\" have no multifd channels: platen's default, its qatzip and \
             qpl, and the SIMULATED device. The document's QATzip has 8. So a verdict on these rows \
             compares one stream of platen with 8 channels of QEMU.",
            "The link has 1 Gbit/s, not 10: both ends and both QEMUs share this machine's few \
             CPUs, and the guest runs under TCG.",
            "The guest has hundreds of MiB, not 64 GB. All of its pages are different.",
            "The QAT device is simulated. Its deflate runs on the same CPUs, so total times with \
             it say nothing. The sender's CPU time leaves the device's own threads out.",
            "Pages a second are all pages by the whole time. The document's are QEMU's of the last \
             moments.",
            "QEMU's own qatzip and qpl are not measured: Debian's QEMU is built without them.",
            "platen's qpl is libqpl's SOFTWARE PATH, on the CPU: no IAA device was there. The row \
             is left out where scripts/fetch-qpl had fetched no libqpl.",
        ],
    );
    section.heading("Memory by channels");
    section.table(reserved());
    match data.samples("hop") {
        Ok(samples) => section.table(memory(samples)),
        Err(why) => section.missing(format!("No memory of platen's relays: {why}.")),
    }
    section.compare(
        &["memory of both ends by the number of channels"],
        &["The document counts what QAT's driver reserves beside QEMU. The row of platen counts \
           all of a relay: program, buffers and codec threads."],
    );
    section.heading("How to choose");
    section.findings(rules(data));
    section
}

fn document() -> Table {
    let mut table = Table::new("The document: 8 channels, 10 Gbit/s", &HEAD);
    for (name, [total, down, rate, pages, send, receive]) in DOCUMENT {
        let one = |value: f64, digits| Spread::one(value).show(digits);
        let sent = one(rate * total / 8e3, 0) + " (computed)";
        let cells = vec![
            name.to_owned(),
            one(total / 1e3, 2),
            one(down, 0),
            one(rate, 0),
            one(pages, 0),
            sent,
            one(send, 0),
            one(receive, 0),
        ];
        table.row(Some(Kind::Document), cells);
    }
    table
}

fn channels(section: &mut Section, samples: &Value) {
    let all = moves(samples);
    let mut table = Table::new(format!("Here: {}", circumstances(samples)), &HEAD);
    for moves in &all {
        table.row(Some(moves.kind), row(moves, samples));
    }
    section.table(table);
    section.figures([
        compared(&all, "Total time, of that without compression", 2, 0, Moves::total),
        compared(&all, "The sender's CPU seconds, of zstd's", 1, 4, Moves::sender),
    ]);
}

fn row(moves: &Moves, samples: &Value) -> Vec<String> {
    if let Some(remark) = moves.remark(number(samples, "/limit-seconds")) {
        return vec![moves.label.clone(), remark];
    }
    vec![
        moves.label.clone(),
        cell(moves.total(), 2),
        cell(moves.downtime(), 0),
        cell(moves.throughput(), 0),
        cell(moves.pages(), 0),
        cell(moves.wire(), 0),
        cell(moves.sender_percent(), 0),
        cell(moves.receiver_percent(), 0),
    ]
}

/// Ratios to the document's row `base` and to the same method here. Column 0 is the total time; 4
/// is CPU in per cent, which times the total time is CPU seconds.
fn compared(
    all: &[Moves],
    caption: &str,
    base: usize,
    column: usize,
    pick: fn(&Moves) -> Option<Spread>,
) -> Option<crate::figure::Figure> {
    let value = |row: usize| {
        let figures = DOCUMENT[row].1;
        if column == 0 {
            figures[0]
        } else {
            figures[column] * figures[0]
        }
    };
    let here = named(all, if base == 2 { "qemu-multifd8-none" } else { "qemu-multifd8-zstd" })?;
    let mut ratios: Vec<Bar> = (0..DOCUMENT.len())
        .map(|row| {
            let ratio = Spread::one(value(row) / value(base));
            Bar::new(format!("document: {}", DOCUMENT[row].0), Kind::Document, ratio)
        })
        .collect();
    let is_meaningful = |moves: &&Moves| column != 0 || moves.kind != Kind::Simulated;
    ratios.extend(all.iter().filter(is_meaningful).filter_map(|moves| moves.against(here, pick)));
    bars(caption, "ratio", 2, &ratios)
}

fn reserved() -> Table {
    let mut table =
        Table::new("The document: memory for QAT", &["channels", "sender MB", "receiver MB"]);
    for (channels, sender, receiver) in MEMORY {
        let cells = [channels, sender, receiver].map(|value| format!("{value:.0}")).to_vec();
        table.row(Some(Kind::Document), cells);
    }
    table
}

/// The document's suggestions, and what the migrations here say of them.
fn rules(data: &Data) -> Vec<Finding> {
    let channels = data.samples("channels").map(moves).unwrap_or_default();
    let svm = Finding::open(
        "Without shared virtual memory QPL is slow: use QATzip there. Elsewhere use QPL first.",
        "Neither QAT nor IAA hardware was there. A row of qpl is libqpl's software path.",
    );
    vec![slow_link(&channels), device(&channels), fast_links(data), svm, against(&channels)]
}

/// The median of a method.
fn median(all: &[Moves], name: &str, pick: fn(&Moves) -> Option<Spread>) -> Option<f64> {
    Some(named(all, name).and_then(pick)?.median).filter(|median| *median > 0.0)
}

fn slow_link(all: &[Moves]) -> Finding {
    let claim = "Where the network is the limit, compression shortens the migration.";
    let total = |name| median(all, name, Moves::total);
    let finding = match (total("qemu-multifd8-zstd"), total("qemu-multifd8-none")) {
        (Some(zstd), Some(none)) => {
            let ratio = zstd / none;
            let found = format!("zstd took {ratio:.2} of the time of none (document: 0.44).");
            Finding::of(claim, found, ratio < 1.0).here(format!("{ratio:.2}"))
        }
        _ => Finding::open(claim, "The migrations by channels are missing."),
    };
    finding.document("zstd took 0.44 of the time of none")
}

/// The sender's CPU time with a device: of QEMU and relay together, as the document counts, and of
/// the relay alone, as docs/figures.md and `platen advise` count.
fn device(all: &[Moves]) -> Finding {
    let claim = "QATzip saves much of the sender's CPU time against zstd.";
    let sender = |name| median(all, name, Moves::sender);
    let finding = match (sender("platen-qatzip-simulated"), sender("qemu-multifd8-zstd")) {
        (Some(device), Some(zstd)) => {
            let ratio = device / zstd;
            let relay = |name| median(all, name, Moves::sending_relay);
            let relays =
                relay("platen-qatzip-simulated").zip(relay("platen:codec=zstd,channels=8"));
            let alone = relays.map_or(String::new(), |(device, zstd)| {
                format!(
                    " The relay alone took {:.2} of the CPU seconds of platen's relay with zstd \
                     over 8 channels.",
                    device / zstd
                )
            });
            let found = format!(
                "With a SIMULATED device and one stream the sender's QEMU and relay together took \
                 {ratio:.2} of the CPU seconds of a QEMU with zstd over 8 channels (document: \
                 0.16).{alone} docs/figures.md and platen advise have another figure, 0.24: that of \
                 the relay alone, with one stream and a larger guest."
            );
            Finding::of(claim, found, ratio < 0.6).here(format!("{ratio:.2}, SIMULATED"))
        }
        _ => Finding::open(claim, "The migration on a simulated device is missing."),
    };
    finding.document("0.16 of zstd's CPU seconds")
}

/// The reverse of the first rule.
fn fast_links(data: &Data) -> Finding {
    let claim = "Where the network is not the limit, compression does not pay.";
    let samples = match data.samples("links") {
        Ok(samples) => samples,
        Err(why) => return Finding::open(claim, format!("No migrations over a fast link: {why}.")),
    };
    let all = moves(samples);
    let total = |name| median(&all, name, Moves::total);
    match (total("platen-default"), total("qemu")) {
        (Some(platen), Some(qemu)) => {
            let ratio = platen / qemu;
            let link = link(samples);
            let found = format!(
                "Over {link} platen's default took {ratio:.2} of QEMU's time: it pays no longer \
                 where this is above 1."
            );
            Finding::of(claim, found, ratio > 1.0)
                .here(format!("platen took {ratio:.2} of QEMU's time over {link}"))
        }
        _ => Finding::open(claim, "The migrations over a fast link are missing."),
    }
}

/// platen on the CPU against the best without a device.
fn against(all: &[Moves]) -> Finding {
    let claim = "platen with zstd over 8 channels takes less time than QEMU with the same.";
    let total = |name| median(all, name, Moves::total);
    let finding = match (total("platen:codec=zstd,channels=8"), total("qemu-multifd8-zstd")) {
        (Some(platen), Some(qemu)) => {
            let ratio = platen / qemu;
            let found = format!(
                "platen took {ratio:.2} of QEMU's time. The document's QATzip, on 4 devices, took \
                 0.82 of it."
            );
            Finding::of(claim, found, ratio < 1.0)
                .here(format!("platen took {ratio:.2} of zstd's time"))
        }
        _ => Finding::open(claim, "The migrations by channels are missing."),
    };
    finding.document("QATzip took 0.82 of zstd's time").of_platen()
}
