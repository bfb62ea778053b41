//! `report`: measures, and writes `index.html` with the samples beside it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{ensure, Context, Result};
use clap::Parser;
use report::record::Record;
use report::run::{self, Places};
use report::{machine, plan};

/// Measures the claims of the documents on which platen is based, and writes one page.
#[derive(Debug, Parser)]
struct Options {
    /// Take ten minutes instead of an hour: fewer runs, less data, fewer cases
    #[arg(long)]
    quick: bool,
    /// Do not measure: make the page from the JSON files in this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["quick", "only", "minutes"])]
    from: Option<PathBuf>,
    /// The folder of index.html. A run first removes the JSON files in its folder data
    #[arg(long, value_name = "DIR", default_value = "target/report")]
    out: PathBuf,
    /// End after this time [default: 60, with --quick 10]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1440))]
    minutes: Option<u64>,
    /// Only these steps
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    only: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(130),
        Err(error) => {
            eprintln!("report: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether it came to its end.
fn run(options: &Options) -> Result<bool> {
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot create {}", options.out.display()))?;
    let page = options.out.join("index.html");
    if let Some(from) = &options.from {
        run::write_page(from, &options.out)?;
        println!("{}", page.display());
        return Ok(true);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        eprintln!("\ninterrupted: the step ends, and the report has what there is");
        asked.store(true, Ordering::Relaxed);
    })?;
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = std::env::current_exe().context("cannot tell where report is")?;
    let programs = own.parent().context("report lies in no folder")?.to_owned();
    let target = programs.parent().unwrap_or(Path::new("target")).to_owned();
    println!("hashing the pages");
    let (corpus, calgary) = machine::pages();
    let mut steps = plan::steps(options.quick, &calgary, &target);
    for name in &options.only {
        let names: Vec<_> = steps.iter().map(|step| step.name).collect();
        ensure!(
            names.contains(&name.as_str()),
            "there is no step {name}: the steps are {}",
            names.join(", ")
        );
    }
    steps.retain(|step| {
        options.only.is_empty() || options.only.iter().any(|only| only == step.name)
    });
    let begun = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mode = match (options.only.is_empty(), options.quick) {
        (false, _) => "partial",
        (true, true) => "quick",
        (true, false) => "full",
    };
    let record = Record {
        mode: mode.to_owned(),
        begun,
        machine: machine::machine(),
        commit: machine::commit(sources),
        corpus,
        ..Record::default()
    };
    let places = Places { out: options.out.clone(), programs, target };
    let budget = options.minutes.map_or(plan::budget(options.quick), |minutes| minutes * 60);
    let record = run::all(&places, &steps, budget, record, &stop)?;
    println!("{}", page.display());
    Ok(!record.interrupted)
}
