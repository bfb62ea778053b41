//! The verdicts of all sections in one place: are the documents' claims true, and does platen beat
//! what the documents measured?

use maud::{html, Markup};

use crate::data::Data;
use crate::record::{Load, StepRecord};
use crate::section::{Block, Finding, Line, Section, Verdict, Whose};

/// The findings of these sections. `is_busy` tells whether a section's steps were disturbed.
pub(crate) fn lines(sections: &[Section], is_busy: impl Fn(&Section) -> bool) -> Vec<Line> {
    let of = |section: &Section| {
        let (id, title, is_busy) = (section.id, section.title, is_busy(section));
        let line = move |finding: &Finding| {
            let finding = finding.clone();
            Line { finding, section: id, title, is_busy }
        };
        let findings = section.blocks.iter().filter_map(|block| match block {
            Block::Findings(all) => Some(all),
            _ => None,
        });
        findings.flatten().map(line).collect::<Vec<_>>()
    };
    sections.iter().flat_map(of).collect()
}

/// The section's steps during which others used the machine.
pub(crate) fn busy_steps<'a>(
    section: &'a Section,
    data: &'a Data,
) -> impl Iterator<Item = (&'a StepRecord, Load)> {
    let steps = section.steps.iter().filter_map(|name| data.step(name));
    steps.filter_map(|step| Some((step, step.load().filter(Load::is_busy)?)))
}

pub(crate) fn markup(lines: &[Line]) -> Markup {
    html! {
        (table("Are the documents' claims true?", Whose::Document, lines))
        (table("Does platen beat them, and are its forecasts right?", Whose::Platen, lines))
    }
}

fn table(question: &str, whose: Whose, lines: &[Line]) -> Markup {
    let lines: Vec<&Line> = lines.iter().filter(|line| line.finding.whose == whose).collect();
    let count = |verdict| lines.iter().filter(|line| line.finding.verdict == verdict).count();
    let [confirmed, contradicted, open] =
        [Verdict::Confirmed, Verdict::Contradicted, Verdict::Open].map(count);
    html! { @if !lines.is_empty() {
        figure class="table" {
            figcaption {
                (question)
                (format!(" {confirmed} confirmed here, {contradicted} contradicted, {open} open"))
            }
            div class="wide" { table class="verdicts" {
                thead { tr { @for name in ["claim", "the document", "here", "verdict", "section"] {
                    th scope="col" { (name) }
                } } }
                tbody { @for line in lines { (row(line)) } }
            } }
        }
    } }
}

fn row(line: &Line) -> Markup {
    let finding = &line.finding;
    let (class, word) = match finding.verdict {
        Verdict::Confirmed => ("confirmed", "confirmed"),
        Verdict::Contradicted => ("contradicted", "contradicted"),
        Verdict::Open => ("open", "open"),
    };
    let or_dash = |text: &str| if text.is_empty() { "–".to_owned() } else { text.to_owned() };
    html! { tr class=(class) {
        th scope="row" { (finding.claim) }
        td data-name="the document" { (or_dash(&finding.document)) }
        td data-name="here" { (or_dash(&finding.here)) }
        td {
            strong { (word) }
            @if line.is_busy && finding.verdict != Verdict::Open { ", on a busy machine" }
        }
        td { a href={ "#" (line.section) } { (line.title) } }
    } }
}
