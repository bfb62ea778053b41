//! The lines on the screen.

use super::super::status::HostStatus;
use super::rates::{Rate, Rates};
use crate::say::printable;
use host::{Phase, Record, Role, Status};
use std::time::Duration;

/// Largest number of ended migrations that are shown.
const ENDED: usize = 5;
/// The longest expected time that is shown: a longer one follows from a rate of nearly 0.
const LONGEST: Duration = Duration::from_secs(86_400);

/// The state that is shown.
pub(super) struct View<'a> {
    pub(super) status: &'a HostStatus,
    pub(super) rates: &'a Rates,
    /// Why the service does not answer. The other fields then are those of its last answer.
    pub(super) gone: Option<&'a str>,
    /// Milliseconds since 1970.
    pub(super) now: u64,
}

impl View<'_> {
    /// The lines for a screen of so many columns and rows.
    pub(super) fn lines(&self, (columns, rows): (usize, usize)) -> Vec<String> {
        let running = &self.status.running;
        let mut lines = vec![self.summary()];
        lines.extend(self.gone.map(|why| format!("the service does not answer: {why}")));
        lines.push(String::new());
        lines.push(heading());
        // The last two lines are for those that have ended.
        let ended = self.ended();
        let left = rows.saturating_sub(lines.len() + ended.len() + 2).max(1);
        let shown = if running.len() > left { left - 1 } else { running.len() };
        let total: f64 =
            running.iter().filter_map(|one| self.rates.of(one)).map(|it| it.network).sum();
        let line = |record| line(record, self.rates.of(record), total, self.now);
        lines.extend(running[..shown].iter().map(line));
        if shown < running.len() {
            lines.push(format!("and {} more: platen list", running.len() - shown));
        }
        lines.push(String::new());
        lines.extend(ended);
        lines.truncate(rows.saturating_sub(1));
        lines.push("q quits".to_owned());
        lines.iter().map(|line| fitted(line, columns)).collect()
    }

    fn summary(&self) -> String {
        let (mut out, mut into) = (0.0, 0.0);
        for record in &self.status.running {
            let network = self.rates.of(record).unwrap_or_default().network;
            *(if record.role == Role::Source { &mut out } else { &mut into }) += network;
        }
        format!(
            "{}: {} migrations run; {} to other hosts, {} from them; {} begun since the start",
            printable(&self.status.name),
            self.status.running.len(),
            rate_of(out),
            rate_of(into),
            self.status.begun
        )
    }

    fn ended(&self) -> Vec<String> {
        let last = self.status.history.iter().rev().take(ENDED);
        let described = |record: &Record| {
            let ago = self.now.saturating_sub(record.ended.unwrap_or(self.now)) / 1000;
            let status = record.status.map_or("ended", Status::name);
            let cause = record.cause.as_ref().map_or(String::new(), |cause| format!(": {cause}"));
            format!(
                "{} ago: {} {} {} {status}{cause}",
                duration(ago),
                vm(record),
                way(record),
                record.peer
            )
        };
        last.map(described).collect()
    }
}

fn heading() -> String {
    format!(
        "{:<16} {:<4} {:<16} {:<8} {:>5} {:>9} {:>6} {:>10} {:>10} {:>5} {:>8} {:>8}",
        "VM",
        "WAY",
        "PEER",
        "PHASE",
        "RAM",
        "SENT",
        "RATIO",
        "STREAM",
        "NETWORK",
        "SHARE",
        "TIME",
        "LEFT"
    )
}

/// Formats a migration that runs. `total` is the rate of all migrations on the network, bytes per
/// second.
fn line(record: &Record, rate: Option<Rate>, total: f64, now: u64) -> String {
    let unknown = || "-".to_owned();
    let progress = match record.ram {
        0 => unknown(),
        ram => format!("{:.0}%", 100.0 * record.ram_sent as f64 / ram as f64),
    };
    let share = rate.filter(|_| total > 0.0).map(|rate| 100.0 * rate.network / total);
    format!(
        "{:<16} {:<4} {:<16} {:<8} {progress:>5} {:>9} {:>6.2} {:>10} {:>10} {:>5} {:>8} {:>8}",
        cut(vm(record), 16),
        way(record),
        cut(&record.peer, 16),
        record.phase.name(),
        bytes(record.transferred as f64),
        record.plain as f64 / record.transferred.max(1) as f64,
        rate.map_or_else(unknown, |rate| rate_of(rate.plain)),
        rate.map_or_else(unknown, |rate| rate_of(rate.network)),
        share.map_or_else(unknown, |share| format!("{share:.0}%")),
        duration(now.saturating_sub(record.began) / 1000),
        left(record, rate).map_or_else(unknown, duration),
    )
}

/// Seconds until all of the RAM has been sent once, at the present rate. `None` if that is unknown:
/// pages that the VM writes meanwhile are sent again.
fn left(record: &Record, rate: Option<Rate>) -> Option<u64> {
    let rate = rate?.ram;
    let bytes = record.ram.checked_sub(record.ram_sent).filter(|left| *left > 0)?;
    // The conversion fails for a rate of 0.
    let left = Duration::try_from_secs_f64((bytes as f64 / rate).ceil()).ok()?;
    let is_known = record.phase == Phase::Active && left < LONGEST;
    is_known.then_some(left.as_secs())
}

fn vm(record: &Record) -> &str {
    record.vm.as_deref().unwrap_or("-")
}

fn way(record: &Record) -> &'static str {
    if record.role == Role::Source {
        "to"
    } else {
        "from"
    }
}

fn cut(text: &str, most: usize) -> String {
    printable(text).chars().take(most).collect()
}

/// Formats bytes with three digits and a unit.
fn bytes(count: f64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let (mut count, mut unit) = (count, 0);
    while count >= 999.5 && unit + 1 < UNITS.len() {
        (count, unit) = (count / 1000.0, unit + 1);
    }
    let digits = usize::from(unit > 0 && count < 99.95);
    format!("{count:.digits$} {}", UNITS[unit])
}

fn rate_of(bytes_per_second: f64) -> String {
    format!("{}/s", bytes(bytes_per_second))
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..100 => format!("{seconds} s"),
        100..6000 => format!("{}:{:02}", seconds / 60, seconds % 60),
        _ => format!("{} h {:02}", seconds / 3600, seconds / 60 % 60),
    }
}

/// Removes control characters from a line and cuts it to `columns`. Names and causes come from
/// other hosts.
fn fitted(line: &str, columns: usize) -> String {
    let line = line.replace(['\n', '\t'], " ");
    printable(&line).chars().take(columns).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn record(id: &str) -> Record {
        Record {
            id: id.into(),
            peer: "hostb".into(),
            vm: Some("g\u{1b}[2J1".into()),
            phase: Phase::Active,
            began: 1000,
            plain: 3_000_000_000,
            transferred: 1_000_000_000,
            ram: 4 << 30,
            ram_sent: 1 << 30,
            ..Record::default()
        }
    }

    /// The lines after two looks, a second apart.
    fn lines(running: Vec<Record>, size: (usize, usize)) -> Vec<String> {
        let mut rates = Rates::default();
        let begin = Instant::now();
        let before = |record: &Record| Record {
            plain: record.plain - 300_000_000,
            transferred: record.transferred - 100_000_000,
            ram_sent: record.ram_sent - (1 << 28),
            ..record.clone()
        };
        rates.take(&running.iter().map(before).collect::<Vec<_>>(), begin);
        rates.take(&running, begin + Duration::from_secs(1));
        let failed = Record {
            phase: Phase::Ended,
            ended: Some(61_000),
            status: Some(Status::Failed),
            cause: Some("a\nreason".into()),
            ..record("0")
        };
        let status = HostStatus {
            name: "hosta".into(),
            running,
            history: vec![failed],
            ..HostStatus::default()
        };
        View { status: &status, rates: &rates, gone: None, now: 101_000 }.lines(size)
    }

    #[test]
    fn a_line_has_progress_rates_share_and_the_expected_end() {
        let lines = lines(vec![record("1"), record("2")], (200, 24));
        assert!(
            lines[0].starts_with("hosta: 2 migrations run; 200 MB/s to other hosts, 0 B/s"),
            "{lines:?}"
        );
        let words: Vec<_> = lines[3].split_whitespace().collect();
        let wanted = "g\\u{1b}[2J1 to hostb active 25% 1.0 GB 3.00 300 MB/s 100 MB/s 50% 1:40 12 s";
        assert_eq!(words.join(" "), wanted);
        assert!(
            lines.iter().any(|line| line == "40 s ago: g\\u{1b}[2J1 to hostb failed: a reason"),
            "{lines:?}"
        );
        assert_eq!(lines.last().unwrap(), "q quits");
    }

    #[test]
    fn the_screen_is_never_too_small() {
        let many: Vec<_> = (0..50).map(|nth| record(&nth.to_string())).collect();
        for size in [(200, 24), (40, 10), (20, 3), (1, 1), (0, 0)] {
            let lines = lines(many.clone(), size);
            assert!(lines.len() <= size.1.max(1), "{size:?}: {lines:?}");
            assert!(lines.iter().all(|line| line.chars().count() <= size.0), "{size:?}: {lines:?}");
        }
        let lines = lines(many, (200, 24));
        assert!(lines.iter().any(|line| line == "and 33 more: platen list"), "{lines:?}");
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        let unknown = Record { ram: 0, ram_sent: 0, ..record("1") };
        assert_eq!(left(&unknown, Some(Rate { ram: 1.0, ..Rate::default() })), None);
        let again = Record { ram_sent: 5 << 30, ..record("1") };
        assert_eq!(left(&again, Some(Rate { ram: 1.0, ..Rate::default() })), None);
        assert!(line(&again, None, 0.0, 0).contains(" 125% "));
        assert_eq!(left(&record("1"), Some(Rate::default())), None);
        assert_eq!(
            [0.0, 999.0, 1e3, 99_960.0, 1e15].map(bytes),
            ["0 B", "999 B", "1.0 kB", "100 kB", "1000 TB"]
        );
        assert_eq!([99, 100, 6000].map(duration), ["99 s", "1:40", "1 h 40"]);
    }
}
