//! The events of a service: its socket for followers, and `platen events`.
//!
//! A follower gets one line of JSON for each event, after a greeting. The service waits for no
//! follower: it drops one that does not read. `platen events` first connects and then asks for the
//! status, so that it misses no event; it does not print an event again that the status contained.

use super::feed::{GREETING, MAX_FOLLOWERS};
use super::status::{self, HostStatus, ANSWERED};
use super::{EventsArgs, ServiceArgs};
use crate::device::endpoint::Endpoint;
use crate::say::{printable_part, say, show};
use anyhow::Context;
use host::{Event, Phase};
use relay::{Listening, UnixAddress};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use time::OffsetDateTime;

/// The longest line that is read.
const MAX_LINE: u64 = 64 << 10;
/// Pause before another attempt to reach a service.
const AGAIN: Duration = Duration::from_millis(500);
/// Number of migrations of which `platen events` remembers the last phase.
const MAX_KNOWN: usize = 2000;

fn address(run_dir: &Path) -> UnixAddress {
    UnixAddress::from(run_dir.join("events.sock"))
}

/// Listens for followers.
pub(super) fn listen(run_dir: &Path) -> anyhow::Result<Listening> {
    Ok(address(run_dir).listen()?)
}

/// Accepts followers until the endpoint is dropped.
pub(super) fn start(
    listener: UnixListener,
    follow: impl Fn(UnixStream) + Send + 'static,
) -> anyhow::Result<Endpoint> {
    Endpoint::start("events", listener, move |stream| {
        follow(stream.try_clone()?);
        Ok(())
    })
}

/// Runs `platen events`.
pub(super) fn run(args: &EventsArgs) -> anyhow::Result<ExitCode> {
    let run_dir = &status::run_dir(&args.service)?;
    let mut known = Known::default();
    let service = || "the service of this host (`platen host`)";
    // A service that does not run at the beginning is an error.
    let mut reader = follow(run_dir).with_context(service)?;
    let mut first = true;
    loop {
        match status_of(&args.service) {
            Ok(status) => {
                for event in known.of_status(&status, first) {
                    print(&event, args.json)?;
                }
                first = false;
                while let Some(event) = next(&mut reader)? {
                    if known.is_new(&event) {
                        print(&event, args.json)?;
                    }
                }
                say("the service has gone; its events follow when it is back");
            }
            Err(error) if first => return Err(error),
            // It has gone again, or it is too busy to answer.
            Err(error) => say(&format!("{error:#}; its events follow when it answers")),
        }
        reader = loop {
            std::thread::sleep(AGAIN);
            if let Ok(reader) = follow(run_dir) {
                break reader;
            }
        };
    }
}

fn status_of(args: &ServiceArgs) -> anyhow::Result<HostStatus> {
    Ok(status::ask(args, status::STATUS)?.1)
}

/// Connects to the service as a follower.
fn follow(run_dir: &Path) -> anyhow::Result<BufReader<UnixStream>> {
    let address = address(run_dir);
    let stream = match address.connect_now() {
        Err(error)
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            anyhow::bail!("it is not served: nobody listens on {}", address.path().display())
        }
        connected => connected.with_context(|| address.path().display().to_string())?,
    };
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWERED))?;
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line).map_err(|error| {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                anyhow::anyhow!("it does not answer within {} s", ANSWERED.as_secs())
            }
            _ => anyhow::Error::from(error).context("its connection was lost"),
        }
    })?;
    anyhow::ensure!(
        line == GREETING,
        "it does not take another follower of its events: it has {MAX_FOLLOWERS}, or is of another \
         version"
    );
    reader.get_ref().set_read_timeout(None)?;
    Ok(reader)
}

/// Reads the next event; `None` if the service has gone.
fn next(reader: &mut BufReader<UnixStream>) -> anyhow::Result<Option<Event>> {
    let mut line = Vec::new();
    match reader.take(MAX_LINE).read_until(b'\n', &mut line) {
        Ok(_) if line.ends_with(b"\n") => {}
        Err(error) if error.kind() != ErrorKind::ConnectionReset => {
            return Err(error).context("the events of the service");
        }
        _ => return Ok(None),
    }
    serde_json::from_slice(&line).map(Some).context("an event of the service")
}

/// The last printed phase of each migration.
#[derive(Default)]
struct Known(BTreeMap<String, Phase>);

impl Known {
    /// Whether this event has not been printed yet.
    fn is_new(&mut self, event: &Event) -> bool {
        let is_new = match self.0.insert(event.id.clone(), event.phase) {
            Some(told) if told as u8 >= event.phase as u8 => {
                self.0.insert(event.id.clone(), told);
                false
            }
            _ => true,
        };
        while self.0.len() > MAX_KNOWN {
            // Later identifiers sort behind earlier ones.
            self.0.pop_first();
        }
        is_new
    }

    /// The events in a status that have not been printed yet. Of the `first` status these are only
    /// the events of running migrations.
    fn of_status(&mut self, status: &HostStatus, first: bool) -> Vec<Event> {
        let all = status.history.iter().chain(&status.running).map(Event::from);
        let new = all.filter(|event| self.is_new(event));
        let new: Vec<_> = new.filter(|event| !first || event.phase != Phase::Ended).collect();
        new
    }
}

fn print(event: &Event, json: bool) -> anyhow::Result<()> {
    let line = if json { serde_json::to_string(event)? } else { described(event) };
    show(&format!("{line}\n"))
}

/// Formats an event as a line for a person.
fn described(event: &Event) -> String {
    let milliseconds = i128::from(event.time) * 1_000_000;
    let at = OffsetDateTime::from_unix_timestamp_nanos(milliseconds)
        .unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (date, time) = (at.date(), at.time());
    let disk = if event.what == host::What::Disk { " disk" } else { "" };
    let vm = event.vm.as_ref().map_or(String::new(), |vm| format!(" of {}", printable_part(vm)));
    let way = if event.role == host::Role::Source { "to" } else { "from" };
    let status = event.status.map_or(event.phase.name(), host::Status::name);
    let cause =
        event.cause.as_ref().map_or(String::new(), |it| format!(": {}", printable_part(it)));
    format!(
        "{}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z {}{disk}{vm} {way} {} (port {}) {status}{cause}",
        date.year(),
        u8::from(date.month()),
        date.day(),
        time.hour(),
        time.minute(),
        time.second(),
        time.millisecond(),
        event.id,
        printable_part(&event.peer),
        event.port
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Record;

    fn event(id: &str, phase: Phase) -> Event {
        Event::from(&Record { id: id.into(), phase, ..Record::default() })
    }

    #[test]
    fn a_service_that_does_not_answer_is_named_as_such() {
        let folder = tempfile::tempdir().unwrap();
        // The kernel accepts the connection.
        let _silent = UnixListener::bind(address(folder.path()).path()).unwrap();
        let error = follow(folder.path()).unwrap_err();
        assert_eq!(error.to_string(), "it does not answer within 30 s");
    }

    #[test]
    fn no_event_is_told_twice_and_none_is_left_out() {
        let mut known = Known::default();
        let record = |id: &str, phase| Record { id: id.into(), phase, ..Record::default() };
        let mut status = HostStatus {
            running: vec![record("2", Phase::Active)],
            history: vec![record("1", Phase::Ended)],
            ..HostStatus::default()
        };
        let told = |events: Vec<Event>| -> Vec<_> {
            events.into_iter().map(|event| (event.id, event.phase)).collect()
        };
        assert_eq!(told(known.of_status(&status, true)), [("2".into(), Phase::Active)]);
        assert!(!known.is_new(&event("2", Phase::Opening)));
        assert!(!known.is_new(&event("2", Phase::Active)));
        assert!(known.is_new(&event("2", Phase::Ending)));
        // The service has gone, 2 has ended, 3 has come and gone, 4 runs.
        status.history.extend([record("2", Phase::Ended), record("3", Phase::Ended)]);
        status.running = vec![record("4", Phase::Opening)];
        let after = told(known.of_status(&status, false));
        let all = [("2", Phase::Ended), ("3", Phase::Ended), ("4", Phase::Opening)];
        assert_eq!(after, all.map(|(id, phase)| (id.to_owned(), phase)));
        (0..3 * MAX_KNOWN)
            .for_each(|nth| assert!(known.is_new(&event(&format!("5{nth:06}"), Phase::Active))));
        assert_eq!(known.0.len(), MAX_KNOWN);
    }

    #[test]
    fn a_person_reads_when_which_and_why() {
        let record = Record {
            id: "7".into(),
            peer: "b\u{1b}".into(),
            port: 49152,
            vm: Some("g1".into()),
            phase: Phase::Ended,
            ended: Some(1_700_000_000_123),
            status: Some(host::Status::Failed),
            cause: Some("the reason\n2023".into()),
            ..Record::default()
        };
        assert_eq!(
            described(&Event::from(&record)),
            "2023-11-14T22:13:20.123Z 7 of g1 to b\\u{1b} (port 49152) failed: the reason\\n2023"
        );
    }
}
