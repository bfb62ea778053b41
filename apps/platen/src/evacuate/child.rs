//! The migration of one VM: a process `platen migrate`, or `virsh migrate`.
//!
//! ```text
//!  evacuate ── SIGINT ──► migrate        in a process group of its own: a terminal's Ctrl-C and
//!      ◄── standard error: messages      hangup reach it by `evacuate` alone, and once
//!      ◄── standard input, a socket: samples, dropped when they are not read
//!      ◄── --json FILE: its report
//! ```
//!
//! `migrate` waits for nothing that `evacuate` shares with it: if `evacuate` is stopped or killed,
//! the migration continues. The figures of a domain of libvirt come from `virsh domjobinfo`
//! (`domain`).

use super::domain;
use super::schedule::Sample;
use anyhow::Context;
use serde_json::Value;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

/// The longest line that is read at once.
const LINE: u64 = 8192;
/// The longest report that is read.
const REPORT: u64 = 1 << 20;

/// An event of a migration.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// A line of text for the user.
    Line(String),
    /// The process, and those that have its standard error, write no more lines.
    NoMoreLines,
    /// libvirt has answered, and has no figures.
    Answer,
    /// The migration's progress. `answers`: its source QEMU has answered the last question in time.
    Sample { sample: Sample, answers: bool },
}

/// A running migration.
#[derive(Debug)]
pub(super) struct Migration {
    child: Child,
    report: PathBuf,
    /// Ends the thread that asks for figures.
    over: Arc<AtomicBool>,
}

impl Migration {
    /// Starts `platen migrate` with these arguments. `tell` gets its messages, with the VM's
    /// number. The process is the last step that can fail: after an error there is none, and the VM
    /// is where it was.
    ///
    /// # Errors
    /// The system has no more processes, threads or descriptors.
    pub(super) fn start(
        vm: usize,
        words: &[OsString],
        folder: &Path,
        tell: &Sender<(usize, Told)>,
    ) -> anyhow::Result<Self> {
        let report = folder.join(format!("{vm}.json"));
        let (ours, theirs) = UnixStream::pair().context("cannot make a socket")?;
        read_lines(vm, ours, tell.clone(), sample, None)?;
        let errors = errors_of(vm, tell, |line| {
            Some(line.strip_prefix("platen: ").unwrap_or(line).to_owned())
        })?;
        let child = Command::new("/proc/self/exe")
            .arg0("platen")
            .arg("migrate")
            .args(words)
            .arg("--feed")
            .arg("--json")
            .arg(&report)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context("cannot start platen migrate")?;
        Ok(Self { child, report, over: Arc::default() })
    }

    /// Starts `virsh migrate` of the domain `name` with these words, as the last step.
    ///
    /// # Errors
    /// The errors of [`Self::start`].
    pub(super) fn start_domain(
        vm: usize,
        name: &str,
        words: &[OsString],
        tell: &Sender<(usize, Told)>,
    ) -> anyhow::Result<Self> {
        let errors = errors_of(vm, tell, |line| {
            let line = line.trim();
            let line = line.strip_prefix("error: ").unwrap_or(line);
            (!line.is_empty()).then(|| line.to_owned())
        })?;
        let over = Arc::new(AtomicBool::new(false));
        let tell = tell.clone();
        domain::follow(name.to_owned(), Arc::clone(&over), move |bytes| {
            // libvirt has asked QEMU's monitor for the figure.
            let sample = |bytes| Sample { bytes, in_doubt: false };
            let told = bytes.map(|bytes| Told::Sample { sample: sample(bytes), answers: true });
            tell.send((vm, told.unwrap_or(Told::Answer))).is_ok()
        })?;
        let child = domain::virsh(&[])
            .args(words)
            .stdout(Stdio::null())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context("cannot start virsh (package libvirt-clients)");
        if child.is_err() {
            over.store(true, Ordering::Release);
        }
        Ok(Self { child: child?, report: PathBuf::new(), over })
    }

    /// Asks the process to cancel the migration. Call this once: a second signal would force the
    /// end. A process whose source QEMU does not answer may never end (`patience`).
    pub(super) fn cancel(&mut self) {
        let id = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        // A process that has ended and was not waited for keeps its number.
        if let (Ok(None), Some(id)) = (self.child.try_wait(), id) {
            let _ = rustix::process::kill_process(id, rustix::process::Signal::INT);
        }
    }

    /// A process that has been started, and the file of its report.
    #[cfg(test)]
    pub(super) fn made(child: Child, report: PathBuf) -> Self {
        Self { child, report, over: Arc::default() }
    }

    /// The process's number.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, once the process has ended.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        let ended = self.child.try_wait().ok().flatten();
        if ended.is_some() {
            self.over.store(true, Ordering::Release);
        }
        ended
    }

    /// Whether the VM has moved: the process may go on, to write a seed (--write-seed).
    pub(super) fn has_moved(&self) -> bool {
        is_of_moved(&self.report())
    }

    /// The report that the process has written; null if there is none.
    pub(super) fn report(&self) -> Value {
        let mut text = String::new();
        let read =
            File::open(&self.report).and_then(|file| file.take(REPORT).read_to_string(&mut text));
        read.ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or_default()
    }
}

/// Whether a report is that of a migration which the source QEMU and the destination have
/// confirmed. `migrate` succeeds whenever it has written such a report.
pub(super) fn is_of_moved(report: &Value) -> bool {
    report["status"] == "completed"
}

/// Parses a line that `migrate --feed` writes.
fn sample(line: &[u8]) -> Option<Told> {
    let value: Value = serde_json::from_slice(line).ok()?;
    let (bytes, in_doubt) = (value["transferred"].as_u64()?, value["in-doubt"].as_bool()?);
    Some(Told::Sample { sample: Sample { bytes, in_doubt }, answers: value["answers"].as_bool()? })
}

/// Starts the thread that reads the messages of a process, and returns the process's standard
/// error. `message` makes the message to the user from a line, if it is one.
fn errors_of(
    vm: usize,
    tell: &Sender<(usize, Told)>,
    message: impl Fn(&str) -> Option<String> + Send + 'static,
) -> anyhow::Result<Stdio> {
    let (errors, theirs) = std::io::pipe().context("cannot make a pipe")?;
    let told = move |line: &[u8]| message(&String::from_utf8_lossy(line)).map(Told::Line);
    read_lines(vm, errors, tell.clone(), told, Some(Told::NoMoreLines))?;
    Ok(theirs.into())
}

/// Reads lines on a thread of its own, which ends with the stream; `end` is told then.
fn read_lines(
    vm: usize,
    from: impl Read + Send + 'static,
    tell: Sender<(usize, Told)>,
    told: impl Fn(&[u8]) -> Option<Told> + Send + 'static,
    end: Option<Told>,
) -> anyhow::Result<()> {
    let body = move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            match (&mut from).take(LINE).read_until(b'\n', &mut line) {
                Ok(1..) => {}
                Ok(0) | Err(_) => break,
            }
            let told = told(line.trim_ascii_end());
            if told.is_some_and(|told| tell.send((vm, told)).is_err()) {
                return;
            }
        }
        if let Some(end) = end {
            // If the evacuation is over, nobody waits for it.
            let _ = tell.send((vm, end));
        }
    };
    let thread = std::thread::Builder::new().name("read".into()).spawn(body);
    thread.context("cannot start a thread").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn the_end_of_the_lines_is_told_behind_the_last_line() {
        let (tell, told) = mpsc::channel();
        let line = |line: &[u8]| Some(Told::Line(String::from_utf8_lossy(line).into_owned()));
        read_lines(3, &b"one\ntwo"[..], tell, line, Some(Told::NoMoreLines)).unwrap();
        let told: Vec<_> = told.iter().map(|(vm, told)| format!("{vm} {told:?}")).collect();
        assert_eq!(told, ["3 Line(\"one\")", "3 Line(\"two\")", "3 NoMoreLines"]);
    }

    #[test]
    fn a_sample_is_a_line_of_the_feed_or_nothing() {
        let of = |text: &str| sample(text.as_bytes());
        for (in_doubt, answers) in [(true, false), (false, true)] {
            let line = crate::progress::feed_line(7, in_doubt, answers);
            let told = Told::Sample { sample: Sample { bytes: 7, in_doubt }, answers };
            assert_eq!(of(line.trim_end()), Some(told));
        }
        for bad in ["", "{}", "7", r#"{"transferred":-1,"in-doubt":true}"#, "\u{fffd}"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
