//! The progress bar of `migrate`.

use crate::say::{say, Way};
use indicatif::{ProgressBar, ProgressStyle};
use qmp::MigrationInfo;
use relay::{Progress, SourceHandle};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a terminal may take for the last drawings.
const CLEARED: Duration = Duration::from_secs(10);

/// A bar over the pages, with ratio, link rate, dirty rate, expected downtime and busy workers.
/// Draws only on a terminal, and by a thread: the terminal may be stopped, and the user's
/// interrupts, the deadline and the end of the migration must not wait for it.
pub(crate) struct Bar {
    /// To the thread; `None` once it has to end.
    drawings: Option<Sender<Drawing>>,
    /// Drawings that the thread has not made yet.
    waiting: Arc<AtomicUsize>,
    /// Disconnected once the thread has ended.
    ended: Receiver<()>,
    last: (Instant, u64),
    rate: f64,
}

enum Drawing {
    State { length: u64, position: u64, message: String },
    Note(String),
}

/// Draws until the migration is over.
fn draw(drawings: &Receiver<Drawing>, waiting: &AtomicUsize) {
    let bar = ProgressBar::new(1);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}") {
        bar.set_style(style);
    }
    for drawing in drawings {
        match drawing {
            Drawing::State { length, position, message } => {
                bar.set_length(length);
                bar.set_position(position);
                bar.set_message(message);
            }
            Drawing::Note(text) => bar.suspend(|| say(&text)),
        }
        waiting.fetch_sub(1, Ordering::AcqRel);
    }
    bar.finish_and_clear();
}

impl Bar {
    pub(crate) fn new() -> Self {
        let (drawings, taken) = channel();
        let (over, ended) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = waiting.clone();
        let body = move || {
            draw(&taken, &left);
            drop::<Sender<()>>(over);
        };
        // Without a terminal, or if the system refuses the thread, there is no bar, and notes are
        // written directly.
        let draws = std::io::stderr().is_terminal()
            && std::thread::Builder::new().name("bar".into()).spawn(body).is_ok();
        let drawings = draws.then_some(drawings);
        Self { drawings, waiting, ended, last: (Instant::now(), 0), rate: 0.0 }
    }

    /// Gives the thread a drawing; false if there is no thread.
    fn give(&self, drawing: Drawing) -> bool {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        self.drawings.as_ref().is_some_and(|to| to.send(drawing).is_ok())
    }

    pub(crate) fn show(&mut self, relay: &Progress, info: Option<&MigrationInfo>) {
        let now = Instant::now();
        let span = now - self.last.0;
        if span >= Duration::from_millis(200) {
            self.rate = (relay.transferred - self.last.1) as f64 * 8.0 / 1e6 / span.as_secs_f64();
            self.last = (now, relay.transferred);
        }
        if self.waiting.load(Ordering::Acquire) > 0 {
            // The terminal does not take the last drawing.
            return;
        }
        let ram = info.and_then(|info| info.ram.as_ref());
        let total = ram.and_then(|ram| ram.total).unwrap_or(0);
        let remaining = ram.and_then(|ram| ram.remaining).unwrap_or(total);
        let ratio = relay.plain as f64 / relay.transferred.max(1) as f64;
        let dirty = ram.and_then(|ram| ram.dirty_pages_rate).unwrap_or(0);
        let downtime = info.and_then(|info| info.expected_downtime);
        let message = format!(
            "{} pages, ratio {ratio:.2}, {:.0} Mbit/s, dirty {dirty} pages/s, expected downtime {}, {}/{} workers busy",
            relay.normal + relay.duplicate,
            self.rate,
            downtime.map_or("unknown".into(), |ms| format!("{ms} ms")),
            relay.busy_workers,
            relay.workers,
        );
        let (length, position) = (total.max(1), total.saturating_sub(remaining));
        self.give(Drawing::State { length, position, message });
    }

    pub(crate) fn note(&self, text: &str) {
        if !self.give(Drawing::Note(text.to_owned())) {
            say(text);
        }
    }

    /// Clears the bar. A terminal that takes nothing keeps it.
    pub(crate) fn done(&mut self) {
        self.drawings = None;
        // Nothing is ever sent on this channel.
        let _ = self.ended.recv_timeout(CLEARED);
    }
}

/// Samples of a migration for `platen evacuate`, on standard input, which is its socket. A sample
/// that is not read is dropped: a migration waits for no reader.
pub(crate) struct Feed(Way);

impl Feed {
    pub(crate) fn new() -> Self {
        Self(Way::to(std::io::stdin().as_fd()))
    }

    /// `answers`: the source QEMU's monitor has answered the last command in time.
    pub(crate) fn tell(&self, handle: &SourceHandle, answers: bool) {
        let line = feed_line(handle.progress().transferred, handle.in_doubt(), answers);
        let _ = self.0.write(std::io::stdin().as_fd(), line.as_bytes());
    }
}

/// Formats one sample.
pub(crate) fn feed_line(transferred: u64, in_doubt: bool, answers: bool) -> String {
    let sample = serde_json::json!({
        "transferred": transferred, "in-doubt": in_doubt, "answers": answers
    });
    format!("{sample}\n")
}
