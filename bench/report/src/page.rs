//! The look: one file with its style sheet, its figures and its hatches.

use maud::{html, Markup, PreEscaped, DOCTYPE};

use crate::data::Data;
use crate::figure::{Figure, Kind};
use crate::record::State;
use crate::section::{Block, Finding, Row, Section, Table, Verdict};
use crate::sections;
use crate::summary::{self, busy_steps};

const STYLE: &str = include_str!("style.css");

/// The patterns that fill what is simulated or computed; `style.css` names them.
const HATCHES: &str = r#"<svg class="hatches" width="0" height="0" aria-hidden="true"><defs>
<pattern id="hatch-simulated" width="7" height="7" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><rect class="under" width="7" height="7"></rect>
<rect class="stripe-simulated" width="3" height="7"></rect></pattern>
<pattern id="hatch-computed" width="6" height="6" patternUnits="userSpaceOnUse"
patternTransform="rotate(-45)"><rect class="under" width="6" height="6"></rect>
<rect class="stripe-computed" width="1.5" height="6"></rect></pattern>
</defs></svg>"#;

/// The whole page.
pub fn page(data: &Data) -> String {
    let all = sections::all(data);
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "platen: the report" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (PreEscaped(HATCHES))
                header {
                    h1 { "platen: the report" }
                    p { (stamp(data)) }
                    nav { ul { @for section in &all {
                        li { a href={ "#" (section.id) } { (section.title) } }
                    } } }
                    (kinds())
                }
                main { @for section in &all { (whole(section, data)) } }
            }
        }
    }
    .into_string()
}

fn stamp(data: &Data) -> String {
    let record = data.record();
    let state = match (record.interrupted, record.complete) {
        (true, _) => ", interrupted",
        (_, false) => ", not complete",
        _ => "",
    };
    let mode = crate::data::short(&record.mode);
    match data.problem() {
        Some(_) => "A run of which nothing is recorded".to_owned(),
        None => format!("A {mode} run of {}{state}", date(record.begun)),
    }
}

/// The day of a time in seconds since 1970, by the civil calendar.
fn date(seconds: u64) -> String {
    // 400 years are 146,097 days; years begin in March, so that a leap day is a year's last.
    let days = (seconds / 86_400).min(3_000_000) + 719_468;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = days / 146_097 * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

fn kinds() -> Markup {
    html! { ul class="kinds" { @for kind in Kind::ALL {
        li { span class={ "swatch " (kind.class()) } {} (kind.label()) }
    } } }
}

fn whole(section: &Section, data: &Data) -> Markup {
    html! {
        section id=(section.id) {
            h2 { (section.title) }
            (busy(section, data))
            @let is_busy = busy_steps(section, data).next().is_some();
            @for block in &section.blocks { (part(block, is_busy)) }
        }
    }
}

/// The warnings that others used the machine, and that a step failed that has figures.
fn busy(section: &Section, data: &Data) -> Markup {
    let loads: Vec<_> = busy_steps(section, data).collect();
    let steps = section.steps.iter().filter_map(|name| data.step(name));
    let failed = steps.filter(|step| step.state != State::Done && data.samples(&step.name).is_ok());
    html! {
        @for step in failed {
            div class="warning missing" role="note" {
                strong { "Not whole. " }
                (crate::data::short(&step.title)) ": " (crate::data::short(&step.why)) "."
            }
        }
        @if !loads.is_empty() {
        div class="warning busy" role="note" {
            strong { "The machine was busy." }
            " Other processes, or the machine's host, used CPU time while these were measured: "
            ul { @for (step, load) in &loads { li {
                (crate::data::short(&step.title))
                (format!(": {:.0} % of the machine, ", load.mean * 100.0))
                (format!("{:.0} % at most", load.most * 100.0))
            } } }
        } }
    }
}

fn part(block: &Block, is_busy: bool) -> Markup {
    match block {
        Block::Heading(text) => html! { h3 { (text) } },
        Block::Text(text) => html! { p { (text) } },
        Block::Table(all) => table(all),
        Block::Figures(all) => html! { div class="figures" { @for one in all { (figure(one)) } } },
        Block::Compare { same, differs } => html! { div class="compare" {
            (list("The same", same))
            (list("Different, and why", differs))
        } },
        Block::Findings(all) => {
            html! { ul class="findings" { @for one in all { (finding(one, is_busy)) } } }
        }
        Block::Summary(lines) => summary::markup(lines),
        Block::Missing(why) => html! { div class="warning missing" role="note" {
            strong { "Not here. " } (why)
        } },
    }
}

fn list(title: &str, all: &[String]) -> Markup {
    html! { @if !all.is_empty() {
        div { h4 { (title) } ul { @for one in all { li { (one) } } } }
    } }
}

fn table(table: &Table) -> Markup {
    let columns = table.head.len();
    // A column of words is set to the left.
    let is_words = |nth: usize| {
        let cells = table.rows.iter().filter_map(|row| row.cells.get(nth));
        let count = cells.clone().filter(|cell| words(cell)).count();
        2 * count > cells.count()
    };
    html! {
        figure class="table" {
            figcaption { (table.caption) }
            div class="wide" { table {
                @if table.head.iter().any(|text| !text.is_empty()) {
                    thead { tr { @for (nth, text) in table.head.iter().enumerate() {
                        th scope="col" class=[is_words(nth).then_some("words")] { (text) }
                    } } }
                }
                tbody { @for row in &table.rows { (line(row, columns, &is_words)) } }
            } }
            @if table.left_out > 0 { p { (table.left_out) " rows more are in the file." } }
        }
    }
}

/// Whether a cell has words and no figure.
fn words(cell: &str) -> bool {
    cell.starts_with(|c: char| c.is_alphabetic())
}

fn line(row: &Row, columns: usize, is_words: &dyn Fn(usize) -> bool) -> Markup {
    let class = row.kind.map_or("", Kind::class);
    let last = row.cells.len().saturating_sub(1);
    html! {
        tr class=(class) { @for (nth, text) in row.cells.iter().enumerate() {
            // A remark in the place of figures.
            @let span = (nth == last && nth > 0 && nth + 1 < columns).then(|| columns - nth);
            @if nth == 0 {
                th scope="row" {
                    @if row.kind.is_some() { span class={ "swatch " (class) } {} }
                    (text)
                }
            } @else {
                @let class = (span.is_some() || is_words(nth)).then_some("words");
                td class=[class] colspan=[span] { (cell(text)) }
            }
        } }
    }
}

/// A cell; a range stands below its median.
fn cell(text: &str) -> Markup {
    match text.split_once(" (").filter(|(_, range)| range.contains(" to ")) {
        Some((median, range)) => html! { (median) " " small { "(" (range) } },
        None => html! { (text) },
    }
}

fn figure(figure: &Figure) -> Markup {
    html! {
        figure {
            figcaption { (figure.caption) }
            (PreEscaped(&figure.svg))
            @if figure.legend.len() > 1 {
                ul class="legend" { @for (nth, line) in figure.legend.iter().enumerate() { li {
                    span class={ "swatch line-" (nth) @if line.1 { " dashed" } } {}
                    (line.0)
                } } }
            }
        }
    }
}

/// A finding; of a busy machine it is none to rely on.
fn finding(finding: &Finding, is_busy: bool) -> Markup {
    let (class, word) = match finding.verdict {
        Verdict::Confirmed => ("confirmed", "Confirmed here"),
        Verdict::Contradicted => ("contradicted", "Contradicted here"),
        Verdict::Open => ("open", "Open"),
    };
    html! { li class=(class) {
        q { (finding.claim) }
        strong {
            (word)
            @if is_busy && finding.verdict != Verdict::Open { ", on a busy machine" }
            "."
        }
        " " (finding.found)
    } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_of_the_civil_calendar() {
        let days = [0, 951_782_400, 951_868_800, 1_795_392_000, u64::MAX];
        let shown = days.map(date);
        assert_eq!(shown[..4], ["1970-01-01", "2000-02-29", "2000-03-01", "2026-11-23"]);
        assert!(shown[4].len() >= 10);
    }
}
