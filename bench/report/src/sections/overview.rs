//! The machine, the load and the steps; and, at the end of the page, the files.

use crate::data::{short, Data};
use crate::figure::{self, lines, Axes};
use crate::record::{State, BUSY};
use crate::section::{Block, Line, Section, Table};
use crate::spread::{grouped, Spread};

/// The points of the figure of the load at most.
const POINTS: usize = 300;

pub(crate) fn section(data: &Data, summary: Vec<Line>) -> Section {
    let mut section = Section::new("overview", "The verdicts, and the run", &[]);
    section.text(
        "platen came from four documents. This page repeats what they measured, on one machine, \
         and puts their figures beside its own. Medians stand first, and the least and the most \
         of the runs in brackets. The methods of a table take turns, so that a change of the \
         machine's load meets all of them. A hatched bar or a dashed line is of a simulated \
         device: it shows software's cost and the effect of waiting, never a device's throughput.",
    );
    section.blocks.push(Block::Summary(summary));
    let record = data.record();
    if let Some(problem) = data.problem() {
        section.missing(format!("The machine and its load are unknown: {problem}."));
    }
    if record.interrupted {
        section.missing("The run was interrupted: the report has what there was by then.");
    }
    let mut machine = Table::new("The machine", &["", ""]);
    let facts = [
        ("CPU", short(&record.machine.cpu)),
        ("CPUs", record.machine.cores.to_string()),
        ("memory", format!("{} MiB", grouped(record.machine.memory_mib as f64, 0))),
        (
            "kind",
            if record.machine.is_virtual { "a virtual machine" } else { "no virtual machine" }
                .into(),
        ),
        ("kernel", short(&record.machine.kernel)),
        ("QEMU", short(&record.machine.qemu)),
        ("sources", short(&record.commit)),
        ("pages", short(&record.corpus.origin)),
        ("mode", short(&record.mode)),
    ];
    if data.problem().is_none() {
        for (name, fact) in facts {
            machine.row(None, vec![name.to_owned(), fact]);
        }
    }
    section.table(machine);
    section.figures([load(data)]);
    section.table(steps(data));
    section
}

/// The load of all steps, one after the other.
fn load(data: &Data) -> Option<figure::Figure> {
    let mut seconds = Vec::new();
    for step in &data.record().steps {
        let stolen = step.stolen.iter().copied().chain(std::iter::repeat(0.0));
        seconds.extend(step.others.iter().zip(stolen).map(|(others, stolen)| others + stolen));
    }
    let width = seconds.len().div_ceil(POINTS).max(1);
    let points: Vec<(f64, Spread)> = seconds
        .chunks(width)
        .zip((0..).step_by(width))
        .filter_map(|(part, at)| {
            let share = Spread::of(part.iter().copied().filter(|share| *share >= 0.0))?;
            Some((f64::from(at) / 60.0, Spread::one(share.median * 100.0)))
        })
        .collect();
    let axes = Axes { x: "minutes of measuring", y: "% of the machine", doubling: false };
    let line =
        figure::Line { label: "other processes, and the host".into(), simulated: false, points };
    lines("CPU time that was not the benchmark's", axes, &[line])
}

fn steps(data: &Data) -> Table {
    let head = ["step", "ended", "duration", "load by others", "command"];
    let mut table = Table::new("The steps", &head);
    for step in &data.record().steps {
        let ended = match step.state {
            State::Done => "done".to_owned(),
            State::LeftOut => format!("left out: {}", short(&step.why)),
            State::Failed => format!("failed: {}", short(&step.why)),
            State::Interrupted => "interrupted".to_owned(),
        };
        let load = step.load().map_or_else(String::new, |load| {
            let warning = if load.is_busy() { "BUSY: " } else { "" };
            format!("{warning}{:.0} %, most {:.0} %", load.mean * 100.0, load.most * 100.0)
        });
        let cells = vec![
            short(&step.title),
            ended,
            format!("{:.0} s", step.seconds),
            load,
            short(&step.command),
        ];
        table.row(None, cells);
    }
    if table.rows.iter().any(|row| row.cells[3].starts_with("BUSY")) {
        table.caption = format!(
            "The steps. BUSY: others used more than {:.0} % of the machine on average",
            BUSY * 100.0
        );
    }
    table
}

/// The files with their hashes.
pub(crate) fn samples(data: &Data) -> Section {
    let mut section = Section::new("samples", "Every sample", &[]);
    section.text(
        "The folder data beside this page has every run of every measurement as JSON. \
         `report --from data` makes the page again.",
    );
    let mut files = Table::new("Files", &["file", "bytes", "XXH3"]);
    for entry in data.entries() {
        let cells = vec![short(&entry.name), grouped(entry.bytes as f64, 0), entry.xxh3.clone()];
        files.row(None, cells);
    }
    section.table(files);
    let mut sets = Table::new("The pages that were compressed", &["set", "bytes", "XXH3"]);
    for set in &data.record().corpus.sets {
        let cells = vec![short(&set.name), grouped(set.bytes as f64, 0), short(&set.xxh3)];
        sets.row(None, cells);
    }
    section.table(sets);
    section
}
