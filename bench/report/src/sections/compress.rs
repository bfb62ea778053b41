//! QEMU's document on its compression threads: idle and writing guest, and the speed of
//! decompression.

use serde_json::Value;

use super::moves::{cell, circumstances, moves, named, Moves};
use crate::data::{each, number, numbers, text, Data};
use crate::figure::{bars, Bar, Kind};
use crate::section::{Finding, Section, Table};
use crate::spread::Spread;

const HEAD: [&str; 6] = ["", "total s", "downtime ms", "MB sent", "Mbit/s", "both ends' CPU s"];
/// Total ms, downtime ms, kB sent, Mbit/s: the original way, and with 8 + 2 threads.
const IDLE: [[f64; 4]; 2] = [[3333.0, 100.0, 363_536.0, 893.73], [1833.0, 27.0, 107_819.0, 482.22]];
const WRITING: [[f64; 4]; 2] =
    [[37369.0, 337.0, 4_274_143.0, 936.99], [15989.0, 173.0, 1_699_824.0, 870.95]];

pub(crate) fn section(data: &Data) -> Section {
    let steps = &["compress-idle", "compress-writing", "codec"];
    let mut section = Section::new("compress", "Compression threads (document 001)", steps);
    section.text(
        "QEMU's document of 2015 compares a migration as it is with one that 8 threads compress \
         by zlib at level 1 and 2 threads decompress: 4 virtual CPUs, 4 GB of memory, a NIC of 1 \
         Gbit/s. platen's rows are with zlib at level 1 and 8 threads, and with its default \
         settings.",
    );
    let (mut ratios, mut found) = (Vec::new(), Vec::new());
    for (step, title, document) in [
        ("compress-idle", "An idle guest", &IDLE),
        ("compress-writing", "A guest that writes", &WRITING),
    ] {
        found.extend(findings(data, step, title, document));
        section.heading(title);
        section.table(table_of(document));
        match data.samples(step) {
            Ok(samples) => ratios.push(here(&mut section, title, samples, document)),
            Err(why) => section.missing(format!("No such migrations: {why}.")),
        }
    }
    section.figures(ratios);
    section.findings(found);
    section.compare(
        &[
            "QEMU's own compress capability at its defaults: 8 threads, 2 threads, level 1 (QEMU \
             7.2)",
            "a link of 1 Gbit/s (the document's speed limit is above its NIC's 1 Gbit/s)",
        ],
        &[
            "Sender, receiver and both QEMUs share this machine's CPUs. The document had two \
             hosts with 16 cores each.",
            "The document's guests were mostly empty: 4.2 GB of memory, 0.36 GB sent. The guest \
             here is full of different pages.",
            "The document's program writes random numbers. The guest here writes pages of memory \
             that shrink as its other pages do: random bytes do not shrink by any codec, and the \
             document's sent only 40 % of them.",
        ],
    );
    section.heading("Decompression against compression");
    match data.samples("codec") {
        Ok(samples) => speeds(&mut section, samples),
        Err(why) => {
            section.missing(format!("No speeds of the codecs: {why}."));
            section.findings(vec![decompression(None)]);
        }
    }
    section
}

fn table_of(document: &[[f64; 4]; 2]) -> Table {
    let mut table = Table::new("The document", &HEAD);
    for (name, [total, down, sent, rate]) in
        [("original way", document[0]), ("8 + 2 threads, zlib 1", document[1])]
    {
        let one = |value: f64, digits| Spread::one(value).show(digits);
        let cells = vec![
            name.to_owned(),
            one(total / 1e3, 2),
            one(down, 0),
            one(sent / 1e3, 0),
            one(rate, 0),
            "–".to_owned(),
        ];
        table.row(Some(Kind::Document), cells);
    }
    table
}

fn here(
    section: &mut Section,
    title: &str,
    samples: &Value,
    document: &[[f64; 4]; 2],
) -> Option<crate::figure::Figure> {
    let all = moves(samples);
    let mut table = Table::new(format!("Here: {}", circumstances(samples)), &HEAD);
    for moves in &all {
        let cells = match moves.remark(number(samples, "/limit-seconds")) {
            Some(remark) => vec![moves.label.clone(), remark],
            None => vec![
                moves.label.clone(),
                cell(moves.total(), 2),
                cell(moves.downtime(), 0),
                cell(moves.wire(), 0),
                cell(moves.throughput(), 0),
                both(moves),
            ],
        };
        table.row(Some(moves.kind), cells);
    }
    section.table(table);
    let base = named(&all, "qemu")?;
    let mut ratios = vec![Bar::new(
        "document: 8 + 2 threads",
        Kind::Document,
        Spread::one(document[1][0] / document[0][0]),
    )];
    let others = all.iter().filter(|moves| moves.name != "qemu");
    ratios.extend(others.filter_map(|moves| moves.against(base, Moves::total)));
    bars(&format!("{title}: total time, of the original way's"), "ratio", 2, &ratios)
}

/// The document's gain by QEMU's own threads, and platen against these threads.
fn findings(data: &Data, step: &str, title: &str, document: &[[f64; 4]; 2]) -> [Finding; 2] {
    let gain = format!("{title}: 8 threads at level 1 shorten the migration.");
    let beats =
        format!("{title}: platen with 8 threads, zlib 1, takes less time than QEMU's threads.");
    let all = data.samples(step).map(moves).unwrap_or_default();
    let total = |name| Some(named(&all, name).and_then(Moves::total)?.median).filter(|s| *s > 0.0);
    let platen = total("platen:codec=zlib,level=1,channels=0,compress-threads=8");
    let (original, threads) = (total("qemu"), total("qemu-compress"));
    let of = |claim: &str, ratio: Option<f64>, who: &str, whom: &str| match ratio {
        Some(ratio) => {
            let here = format!("{ratio:.2} of the time of {whom}");
            Finding::of(claim, format!("{who} took {here}."), ratio < 1.0).here(here)
        }
        None => Finding::open(claim, "Not all of these migrations have ended."),
    };
    let ratio = |this: Option<f64>, base: Option<f64>| Some(this? / base?);
    let (who, whom) = ("QEMU's threads", "the original way");
    let stated = document[1][0] / document[0][0];
    [
        of(&gain, ratio(threads, original), who, whom)
            .document(format!("{stated:.2} of the time of {whom}")),
        of(&beats, ratio(platen, threads), "platen", who).of_platen(),
    ]
}

fn both(moves: &Moves) -> String {
    match (moves.sender(), moves.receiver()) {
        (Some(sender), Some(receiver)) => format!("{:.1}", sender.median + receiver.median),
        _ => "–".to_owned(),
    }
}

/// The name of codec qpl, with the path of the library.
fn qpl(samples: &Value) -> String {
    match text(samples, "/qpl/path").as_str() {
        "hardware" => "qpl (IAA device)".to_owned(),
        _ => "qpl (software path)".to_owned(),
    }
}

fn speeds(section: &mut Section, samples: &Value) {
    let head =
        ["codec", "unit", "compress, CPU s/GiB", "decompress, CPU s/GiB", "times as fast", "ratio"];
    let pages = crate::data::set_name(&text(samples, "/set"));
    let mut table = Table::new(format!("Here: each codec alone on one thread, {pages}"), &head);
    let mut times = vec![Bar::new("document: zlib, at least", Kind::Document, Spread::one(4.0))];
    let mut zlib = None;
    for row in each(samples, "/rows") {
        let runs = each(row, "/runs");
        let (compress, decompress) = (numbers(runs, "/compress"), numbers(runs, "/decompress"));
        let pairs = compress.iter().zip(&decompress).filter(|(_, down)| **down > 0.0);
        let Some(faster) = Spread::of(pairs.map(|(up, down)| up / down)) else { continue };
        let codec = text(row, "/codec");
        let shown = match codec.strip_prefix("qpl") {
            Some(_) => qpl(samples),
            None => codec.clone(),
        };
        let unit = number(row, "/unit_bytes").unwrap_or(0.0) / 1024.0;
        let cells = vec![
            shown.clone(),
            format!("{unit:.0} KiB"),
            cell(Spread::of(compress), 2),
            cell(Spread::of(decompress), 2),
            faster.show(1),
            number(row, "/ratio").map_or("–".into(), |ratio| format!("{ratio:.2}")),
        ];
        table.row(Some(Kind::Platen), cells);
        if unit > 4.0 {
            times.push(Bar::new(&shown, Kind::Platen, faster));
        }
        if codec == "zlib:1" {
            zlib = Some((faster.median, unit));
        }
    }
    section.table(table);
    section.figures([bars(
        "Decompression, times as fast as compression (units of a relay)",
        "times",
        1,
        &times,
    )]);
    section.findings(vec![decompression(zlib)]);
    section.text(
        "platen takes the number of CPUs for both directions, at most 8: threads without work \
         sleep and cost nothing, so the ratio of the speeds needs no setting.",
    );
}

/// zlib 1: how many times as fast it decompresses as it compresses, and the unit in KiB.
fn decompression(zlib: Option<(f64, f64)>) -> Finding {
    let claim =
        "Decompression by zlib is at least 4 times as fast as compression, so 8 threads need 2.";
    let finding = match zlib {
        Some((faster, unit)) => {
            let found = format!(
                "zlib 1 decompresses {faster:.2} times as fast as it compresses here (units of \
                 {unit:.0} KiB, both by libdeflate with a checksum; the document's is zlib \
                 itself)."
            );
            Finding::of(claim, found, faster >= 4.0).here(format!("{faster:.2} times as fast"))
        }
        None => Finding::open(claim, "zlib was not measured."),
    };
    finding.document("at least 4 times as fast")
}
