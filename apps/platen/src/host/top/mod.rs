//! `platen top`: the migrations of this host, live, on a terminal.
//!
//! Once a second it asks the service for the data of `platen list --json`, and draws them
//! ([`view`]). A migration that is missing from the answer has ended: its outcome comes from the
//! history.

mod rates;
mod screen;
mod view;

use super::status::{self, HostStatus, LIST, STATUS};
use super::ServiceArgs;
use anyhow::{ensure, Context};
use host::now;
use rates::Rates;
use screen::{Key, Screen};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use view::View;

/// Interval of queries to the service.
const TICK: Duration = Duration::from_secs(1);

/// Runs `platen top`.
pub(super) fn run(args: &ServiceArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        std::io::stdout().is_terminal() && std::io::stdin().is_terminal(),
        "it draws on a terminal; `platen list --json` and `platen events --json` are for programs"
    );
    // A service that does not run at the beginning is an error.
    let (_, first) = status::ask(args, STATUS)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    ctrlc::set_handler(move || stopping.store(true, Ordering::Release))
        .context("cannot handle signals")?;
    let mut shown = Shown { status: first, rates: Rates::default(), gone: None };
    let screen = Screen::open()?;
    while !stop.load(Ordering::Acquire) {
        shown.rates.take(&shown.status.running, Instant::now());
        let drawn = Instant::now();
        loop {
            screen.draw(&shown.view().lines(screen.size()))?;
            let left = TICK.saturating_sub(drawn.elapsed());
            match screen.key(left)? {
                Some(Key::Quit) => return Ok(ExitCode::SUCCESS),
                // The terminal has another size, or the key has no meaning.
                Some(Key::Other) if !left.is_zero() && !stop.load(Ordering::Acquire) => {}
                _ => break,
            }
        }
        shown.look(args);
    }
    Ok(ExitCode::SUCCESS)
}

/// State of the screen.
struct Shown {
    status: HostStatus,
    rates: Rates,
    /// Why the service does not answer.
    gone: Option<String>,
}

impl Shown {
    /// Asks the service again.
    fn look(&mut self, args: &ServiceArgs) {
        let asked = status::ask_soon(args, LIST).and_then(|(_, mut new)| {
            let has_ended = |id: &String| new.running.iter().all(|one| one.id != *id);
            // The history is a file for each migration.
            new.history = if self.status.running.iter().any(|one| has_ended(&one.id)) {
                status::ask_soon(args, STATUS)?.1.history
            } else {
                std::mem::take(&mut self.status.history)
            };
            Ok(new)
        });
        match asked {
            Ok(new) => (self.status, self.gone) = (new, None),
            Err(error) => self.gone = Some(format!("{error:#}")),
        }
    }

    fn view(&self) -> View<'_> {
        let Self { status, rates, gone } = self;
        View { status, rates, gone: gone.as_deref(), now: now() }
    }
}
