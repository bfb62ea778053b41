//! The parts of a page, without their look.

use crate::figure::{Figure, Kind};

/// A chapter of the report.
#[derive(Debug)]
pub(crate) struct Section {
    /// The anchor.
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    /// The steps whose load it warns of.
    pub(crate) steps: &'static [&'static str],
    pub(crate) blocks: Vec<Block>,
}

impl Section {
    pub(crate) fn new(
        id: &'static str,
        title: &'static str,
        steps: &'static [&'static str],
    ) -> Self {
        Self { id, title, steps, blocks: Vec::new() }
    }

    pub(crate) fn text(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Text(text.into()));
    }

    pub(crate) fn heading(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Heading(text.into()));
    }

    pub(crate) fn table(&mut self, table: Table) {
        if !table.rows.is_empty() {
            self.blocks.push(Block::Table(table));
        }
    }

    /// Figures beside each other; those that could not be drawn are left out, as they have no
    /// samples.
    pub(crate) fn figures(&mut self, figures: impl IntoIterator<Item = Option<Figure>>) {
        let drawn: Vec<Figure> = figures.into_iter().flatten().collect();
        if !drawn.is_empty() {
            self.blocks.push(Block::Figures(drawn));
        }
    }

    /// Samples that are not there.
    pub(crate) fn missing(&mut self, why: impl Into<String>) {
        self.blocks.push(Block::Missing(why.into()));
    }

    /// The points that are as in the document, and those that are not, with the cause.
    pub(crate) fn compare(&mut self, same: &[&str], differs: &[&str]) {
        let owned = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect();
        self.blocks.push(Block::Compare { same: owned(same), differs: owned(differs) });
    }

    /// Sentences that the figures decide.
    pub(crate) fn findings(&mut self, findings: Vec<Finding>) {
        if !findings.is_empty() {
            self.blocks.push(Block::Findings(findings));
        }
    }
}

/// A piece of a section.
#[derive(Debug)]
pub(crate) enum Block {
    Heading(String),
    Text(String),
    Table(Table),
    Figures(Vec<Figure>),
    Compare {
        same: Vec<String>,
        differs: Vec<String>,
    },
    Findings(Vec<Finding>),
    /// The findings of all sections, in short.
    Summary(Vec<Line>),
    Missing(String),
}

/// Whether the measurement agrees with a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Confirmed,
    Contradicted,
    /// Nothing here can tell.
    Open,
}

/// Whose claim it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    Document,
    /// platen's own: that it beats what the document measured, or predicts well.
    Platen,
}

/// A claim, what was found, and whether they agree.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) claim: String,
    pub(crate) found: String,
    pub(crate) verdict: Verdict,
    pub(crate) whose: Whose,
    /// The document's figure and that of here, for the summary; empty where there is none.
    pub(crate) document: String,
    pub(crate) here: String,
}

impl Finding {
    /// Confirmed or contradicted.
    pub(crate) fn of(claim: &str, found: String, holds: bool) -> Self {
        let verdict = if holds { Verdict::Confirmed } else { Verdict::Contradicted };
        Self { found, verdict, ..Self::open(claim, "") }
    }

    /// Nothing here can tell.
    pub(crate) fn open(claim: &str, why: impl Into<String>) -> Self {
        Self {
            claim: claim.to_owned(),
            found: why.into(),
            verdict: Verdict::Open,
            whose: Whose::Document,
            document: String::new(),
            here: String::new(),
        }
    }

    /// The document's figure.
    pub(crate) fn document(self, figure: impl Into<String>) -> Self {
        Self { document: figure.into(), ..self }
    }

    /// The figure of here.
    pub(crate) fn here(self, figure: impl Into<String>) -> Self {
        Self { here: figure.into(), ..self }
    }

    /// A claim of platen.
    pub(crate) fn of_platen(self) -> Self {
        Self { whose: Whose::Platen, ..self }
    }
}

/// Rows that a table shows at most.
const MOST_ROWS: usize = 300;

/// A table; the first column has the rows' names.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) caption: String,
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Row>,
    /// Rows that only the file has.
    pub(crate) left_out: usize,
}

impl Table {
    pub(crate) fn new(caption: impl Into<String>, head: &[&str]) -> Self {
        let head = head.iter().map(|text| (*text).to_owned()).collect();
        Self { caption: caption.into(), head, rows: Vec::new(), left_out: 0 }
    }

    /// The table in Markdown, under its caption.
    pub(crate) fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = self.head.iter().map(|_| "---".to_owned()).collect::<Vec<_>>();
        let rows = self.rows.iter().map(|row| line(&row.cells)).collect::<String>();
        format!("{}:\n\n{}{}{rows}", self.caption, line(&self.head), line(&rule))
    }

    pub(crate) fn row(&mut self, kind: Option<Kind>, cells: Vec<String>) {
        match self.rows.len() {
            0..MOST_ROWS => self.rows.push(Row { kind, cells }),
            _ => self.left_out += 1,
        }
    }
}

/// A row of a table.
#[derive(Debug)]
pub(crate) struct Row {
    /// Whose figures they are, if that differs within the table.
    pub(crate) kind: Option<Kind>,
    pub(crate) cells: Vec<String>,
}

/// A finding, with its section.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) finding: Finding,
    pub(crate) section: &'static str,
    pub(crate) title: &'static str,
    /// Whether others used the machine meanwhile.
    pub(crate) is_busy: bool,
}
