//! Measures direct and asynchronous offload on a device or on the simulated one.
//!
//! ```text
//! PLATEN_QAT_SIM='latency 30' cargo run --release -p qat --example offload_cost -- FOLDER-OF-LIBRARIES [PAGES [IN-FLIGHT]]
//! ```
//!
//! `engine stored` in the simulated device's script leaves only the software's cost.

use qat::measure::{compare, Plan};
use qat::{Direction, Engine, EngineOptions, Libraries, Location, Qat, StartOptions};
use std::error::Error;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let location =
        arguments.next().map_or(Location::System, |folder| Location::Folder(folder.into()));
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let plan = Plan {
        pages: number(200_000)?,
        in_flight: number(128)?,
        busy: false,
        at_most: Duration::from_secs(4),
    };
    let corpus = corpus::Corpus::load();
    let pages = corpus.mixed_unique();
    let qat = Qat::start(&Libraries::load(&location)?, &StartOptions::default())?;
    let options = EngineOptions {
        max_plain: qat::measure::PAGE,
        depth: plan.in_flight,
        direction: Direction::Compress,
        share: false,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Some(&qat), options);
    println!("{}", serde_json::to_string_pretty(&compare(&mut engine, &pages, &plan))?);
    Ok(())
}
