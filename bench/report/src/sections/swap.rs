//! The swap path: a swap-in by ublk beside zram and zswap.

use serde_json::Value;

use crate::data::{each, number, text, Data};
use crate::figure::{bars, Bar, Kind};
use crate::section::{Section, Table};
use crate::spread::Spread;

pub(crate) fn section(data: &Data) -> Section {
    let mut section = Section::new("swap", "The swap path", &["swap"]);
    section.text(
        "A program fills 64 MiB in a guest, the kernel swaps them out, and one or four threads \
         read each page once in a random order. platen's pages go through ublk; zram and zswap \
         are the same guest's own. None of the documents has this table.",
    );
    match data.samples("swap") {
        Ok(samples) => here(&mut section, samples),
        Err(why) => section.missing(format!("No swap-ins: {why}.")),
    }
    section.compare(
        &["guest, memory, pages, codec and order of the reads, for all rows"],
        &["The guest runs under QEMU's TCG, which slows the kernel's request path more than a \
           codec: the rows compare with each other under TCG, and with no machine."],
    );
    section
}

/// Of each run's percentiles (nanoseconds) one, in microseconds.
fn percentile(row: &Value, column: usize) -> Option<Spread> {
    let runs = each(row, "/runs").iter();
    Spread::of(runs.filter_map(|run| Some(number(run, &format!("/{column}"))? / 1e3)))
}

fn here(section: &mut Section, samples: &Value) {
    let head = ["", "p50 µs", "p99 µs", "p99.9 µs"];
    let mut table = Table::new("Here: a swap-in; medians of the runs' percentiles", &head);
    let mut figures = [Vec::new(), Vec::new()];
    for row in each(samples, "/rows") {
        let name = text(row, "/name");
        let kind = if name.starts_with("platen") { Kind::Platen } else { Kind::Other };
        let all = [0, 1, 2].map(|column| percentile(row, column));
        let cells = all.map(|spread| super::moves::cell(spread, 0));
        table.row(Some(kind), [vec![name.clone()], cells.to_vec()].concat());
        for (bars, spread) in figures.iter_mut().zip(all) {
            bars.extend(spread.map(|spread| Bar::new(&name, kind, spread)));
        }
    }
    section.table(table);
    let [middle, late] = figures;
    section.figures([
        bars("A swap-in, p50", "µs", 0, &middle),
        bars("A swap-in, p99", "µs", 0, &late),
    ]);
}
