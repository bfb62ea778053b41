//! The progress bar of `migrate`.

use crate::say::{say, Way};
use indicatif::{ProgressBar, ProgressStyle};
use qmp::MigrationInfo;
use relay::{Progress, SourceHandle};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A bar over the pages, with ratio, link rate, dirty rate, expected downtime and busy workers.
/// Draws only on a terminal.
pub(crate) struct Bar {
    bar: ProgressBar,
    last: (Instant, u64),
    rate: f64,
}

impl Bar {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new(1);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}") {
            bar.set_style(style);
        }
        Self { bar, last: (Instant::now(), 0), rate: 0.0 }
    }

    pub(crate) fn show(&mut self, relay: &Progress, info: Option<&MigrationInfo>) {
        let now = Instant::now();
        let span = now - self.last.0;
        if span >= Duration::from_millis(200) {
            self.rate = (relay.transferred - self.last.1) as f64 * 8.0 / 1e6 / span.as_secs_f64();
            self.last = (now, relay.transferred);
        }
        let ram = info.and_then(|info| info.ram.as_ref());
        let total = ram.and_then(|ram| ram.total).unwrap_or(0);
        let remaining = ram.and_then(|ram| ram.remaining).unwrap_or(total);
        self.bar.set_length(total.max(1));
        self.bar.set_position(total.saturating_sub(remaining));
        let ratio = relay.plain as f64 / relay.transferred.max(1) as f64;
        let dirty = ram.and_then(|ram| ram.dirty_pages_rate).unwrap_or(0);
        let downtime = info.and_then(|info| info.expected_downtime);
        self.bar.set_message(format!(
            "{} pages, ratio {ratio:.2}, {:.0} Mbit/s, dirty {dirty} pages/s, expected downtime {}, {}/{} workers busy",
            relay.normal + relay.duplicate,
            self.rate,
            downtime.map_or("unknown".into(), |ms| format!("{ms} ms")),
            relay.busy_workers,
            relay.workers,
        ));
    }

    pub(crate) fn note(&self, text: &str) {
        self.bar.suspend(|| say(text));
    }

    pub(crate) fn done(&self) {
        self.bar.finish_and_clear();
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
