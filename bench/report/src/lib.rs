//! The report: the claims of the documents on which platen is based, beside this machine's
//! measurements.
//!
//! ```text
//!  plan ──► run: one benchmark after the other ──► DIR/data/STEP.json    (every sample)
//!            │ load: what other processes used     DIR/data/run.json     (machine, steps, load)
//!            ▼
//!  data ◄── reads those files, within bounds
//!   │
//!   └─► sections: tables, figures, words ──► page ──► DIR/index.html     (one file, no network)
//! ```
//!
//! A page is made after each step, so that an interrupted run leaves a report of what there is; and
//! it can be made again from the files without measuring ([`Data::load`], [`page()`]).
//!
//! # What fails
//!
//! A step that cannot run here, fails or takes too long is recorded with its reason, and the page
//! shows the reason in its place. So do files that are missing, are no JSON or are too large: no
//! file makes a panic, and [`data`] states the bounds. Only a folder that cannot be read or written
//! is an error.
//!
//! # Limits
//!
//! Linux. The benchmarks are programs beside this one (`target/release`); the report has no
//! measuring code of its own.

pub mod data;
mod figure;
mod load;
pub mod machine;
mod page;
pub mod plan;
pub mod record;
pub mod run;
mod scatter;
mod section;
mod sections;
mod spread;
mod summary;

pub use data::Data;
pub use page::page;

/// The tables of the section on scaling as Markdown, computed from the samples; `None` without any.
pub fn scaling(data: &Data) -> Option<String> {
    sections::scaling::markdown(data)
}

/// The tables of `scripts/bench-threads` as Markdown, with the rates that the model of the section
/// on scaling computes for the same machine; `None` without samples.
pub fn threads(data: &Data) -> Option<String> {
    sections::measured::markdown(data)
}
