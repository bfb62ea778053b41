//! `platen-bench pool`: the cost of the engine, and a comparison with QEMU's old threads.
//!
//! Three questions, each answered by medians of runs that take turns, so that a machine that is
//! slower for a while is slower for all of them:
//!
//! 1. How much more CPU time does the pool take than a bare loop around the codec?
//! 2. How many futex calls do they make while both sides are busy?
//! 3. How does the same work compare with the scheme of QEMU until 2018 and again until 9.0 (one
//!    pending request, a lock and a condition per thread, a global done lock), with
//!    compress-wait-thread on and off, over a link of a given rate, and for decompression?

mod data;
mod link;
mod measure;
mod old;
mod overhead;
mod report;
mod table;
mod units;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};

use data::Pages;

/// The part to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The pool against a bare codec loop, and its futex calls.
    Overhead,
    /// The pool against QEMU's old scheme.
    Table,
}

/// Arguments of `platen-bench pool`.
#[derive(Args, Debug)]
pub(super) struct PoolArgs {
    /// File of 4 KiB pages to compress; without it, made pages
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// MiB of it to use
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
    /// Runs of each kind; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Only this part
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Worker threads in the comparison with the old scheme
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8, 16], value_name = "N,...",
          value_parser = clap::value_parser!(u16).range(1..=128))]
    threads: Vec<u16>,
    /// Codec of that comparison; QEMU's own was zlib
    #[arg(long, default_value = "zlib")]
    codec: codec::Codec,
    /// Its level
    #[arg(long, default_value_t = 1)]
    level: i32,
    /// Rate of the link in that comparison, Gbit/s; 0 for one that takes no time
    #[arg(long, default_value_t = 1.0, value_name = "GBIT")]
    link: f64,
    /// Write the figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the benchmark and prints its tables.
///
/// # Errors
///
/// Data that cannot be read, threads or memory that the system refuses, a JSON file that cannot be
/// written, and a page that a scheme does not restore.
pub(super) fn run(args: PoolArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.link.is_finite() && args.link >= 0.0,
        "--link {} is not a rate; give Gbit/s, or 0 for a link that takes no time",
        args.link
    );
    let settings = codec::Settings::new(args.codec, Some(args.level))?;
    let pages = Pages::load(args.data.as_deref(), args.mib as usize)?;
    report::header(&pages, args.runs);
    let mut figures = serde_json::json!({
        "data": pages.name,
        "bytes": pages.bytes.len(),
        "runs": args.runs,
        "cpus": measure::cpus(),
    });
    if args.only != Some(Part::Table) {
        let rows = overhead::measure(&pages, args.runs)?;
        report::overhead(&rows);
        figures["overhead"] = report::overhead_json(&rows);
    }
    if args.only != Some(Part::Overhead) {
        let plan = table::Plan {
            threads: args.threads.iter().map(|&n| usize::from(n)).collect(),
            settings,
            link_gbit: args.link,
            runs: args.runs,
        };
        let rows = table::measure(&pages, &plan)?;
        report::table(&plan, &rows);
        figures["table"] = report::table_json(&plan, &rows);
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&figures)?;
        std::fs::write(path, text + "\n")
            .with_context(|| format!("cannot write the figures to {}", path.display()))?;
    }
    Ok(())
}
