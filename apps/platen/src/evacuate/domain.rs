//! A VM under libvirt: `virsh` examines and migrates it, and shows where it is.
//!
//! Each command is a process with a time limit: a libvirtd that hangs delays no other VM.

use super::report::Outcome;
use anyhow::{bail, ensure, Context};
use std::ffi::OsString;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of one command.
const LIMIT: Duration = Duration::from_secs(30);
/// The interval between two checks of a command, and between two of the figures of a migration.
const TICK: Duration = Duration::from_millis(20);
const FIGURES: Duration = Duration::from_secs(1);
/// Longest time in which libvirt continues a VM whose migration has failed.
const PATIENCE: Duration = Duration::from_secs(30);
/// Seconds for which the guest's writes are measured.
const MEASURED: u64 = 5;
/// The longest output that is read.
const OUTPUT: u64 = 64 << 10;

/// Prepares a command of `virsh`, with messages in English.
pub(super) fn virsh(words: &[&str]) -> Command {
    let mut command = Command::new("virsh");
    command.arg("-q").args(words).env("LC_ALL", "C").stdin(Stdio::null());
    command
}

/// Runs `virsh` and returns its output. Its error is the last line that it prints.
fn ask(words: &[&str]) -> anyhow::Result<String> {
    let mut child = virsh(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start virsh (package libvirt-clients)")?;
    let out = child.stdout.take().map(|pipe| Box::new(pipe) as Box<_>);
    let errors = child.stderr.take().map(|pipe| Box::new(pipe) as Box<_>);
    let threads = read(out).and_then(|out| Ok((out, read(errors)?)));
    let (out, errors) = match threads {
        Ok(threads) => threads,
        Err(error) => {
            // It only asks, and nobody would read its answer.
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    };
    let status = within(&mut child, LIMIT).with_context(|| {
        format!("virsh {} has not answered within {} s", words.join(" "), LIMIT.as_secs())
    })?;
    let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
    let (out, errors) = (text(out), text(errors));
    let last = errors.lines().last().unwrap_or("no message").trim_start_matches("error: ");
    ensure!(status.success(), "virsh {}: {last:.300}", words.join(" "));
    Ok(out)
}

/// Starts the thread that reads what `virsh` prints.
fn read(from: Option<Box<dyn Read + Send>>) -> anyhow::Result<thread::JoinHandle<String>> {
    let body = move || {
        let mut text = Vec::new();
        if let Some(from) = from {
            // The bytes before an error count.
            let _ = from.take(OUTPUT).read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    };
    thread::Builder::new().name("virsh".into()).spawn(body).context("cannot start a thread")
}

/// Waits for a process; kills it after `limit`.
fn within(child: &mut Child, limit: Duration) -> anyhow::Result<std::process::ExitStatus> {
    let until = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().context("virsh")? {
            return Ok(status);
        }
        if Instant::now() >= until {
            let _ = child.kill();
            let _ = child.wait();
            bail!("it was killed");
        }
        thread::sleep(TICK);
    }
}

/// A domain before its migration.
#[derive(Debug)]
pub(super) struct Looked {
    /// libvirt's state of the domain.
    pub(super) state: String,
    /// Bytes of RAM.
    pub(super) ram: u64,
    /// Bytes of distinct pages that the guest writes to per second, by QEMU's samples; `None` where
    /// libvirt did not report them.
    pub(super) dirty: Option<f64>,
}

/// Examines a domain, for some seconds if it runs. Changes nothing.
///
/// # Errors
/// The domain cannot migrate; the message gives the reason.
pub(super) fn look(name: &str, go_on: &dyn Fn() -> bool) -> anyhow::Result<Looked> {
    let state = ask(&["domstate", "--domain", name])?;
    ensure!(
        matches!(state.as_str(), "running" | "paused" | "idle"),
        "the domain does not run here (it is '{state:.64}')"
    );
    ensure!(!has_job(name)?, "the domain has a job already: virsh domjobinfo {name}");
    let stats = ask(&["domstats", "--domain", name, "--balloon"])?;
    let ram = number(&stats, "balloon.current").context("libvirt does not tell its RAM")?;
    let dirty = match state.as_str() {
        "running" => dirty_rate(name, go_on),
        _ => Some(0.0),
    };
    Ok(Looked { state, ram: ram << 10, dirty })
}

/// Whether libvirt runs a job on the domain.
fn has_job(name: &str) -> anyhow::Result<bool> {
    let info = ask(&["domjobinfo", "--domain", name])?;
    Ok(!info
        .lines()
        .any(|line| line.strip_prefix("Job type:").is_some_and(|kind| kind.trim() == "None")))
}

/// Bytes per second by QEMU's calc-dirty-rate; the figure only sorts.
fn dirty_rate(name: &str, go_on: &dyn Fn() -> bool) -> Option<f64> {
    ask(&["domdirtyrate-calc", "--domain", name, "--seconds", &MEASURED.to_string()]).ok()?;
    let until = Instant::now() + Duration::from_secs(2 * MEASURED) + LIMIT;
    while go_on() && Instant::now() < until {
        thread::sleep(Duration::from_millis(200));
        let stats = ask(&["domstats", "--domain", name, "--dirtyrate"]).ok()?;
        // 2: measured.
        if number(&stats, "dirtyrate.calc_status") == Some(2) {
            let mib = number(&stats, "dirtyrate.megabytes_per_second")?;
            return Some((mib << 20) as f64);
        }
    }
    None
}

/// The value of `key` in libvirt's `key=value` lines.
fn number(stats: &str, key: &str) -> Option<u64> {
    let line = stats.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix('='));
    line?.trim().parse().ok()
}

/// The words of `virsh migrate`. `bandwidth`: MiB per second.
pub(super) fn words(
    name: &str,
    uri: &str,
    flags: &[String],
    bandwidth: Option<u64>,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["migrate".into(), "--live".into()];
    words.extend(flags.iter().map(OsString::from));
    if let Some(mib) = bandwidth {
        words.extend(["--bandwidth".into(), mib.to_string().into()]);
    }
    words.extend(["--domain".into(), name.into(), "--desturi".into(), uri.into()]);
    words
}

/// Passes the bytes that a domain has sent to `tell`, each second until `over`, or until `tell`
/// returns false; `None` if libvirt answers without this figure.
pub(super) fn follow(
    name: String,
    over: Arc<AtomicBool>,
    tell: impl Fn(Option<u64>) -> bool + Send + 'static,
) -> anyhow::Result<()> {
    let body = move || {
        while !over.load(Ordering::Acquire) {
            thread::sleep(FIGURES);
            let info = ask(&["domjobinfo", "--domain", &name]);
            if info.is_ok_and(|info| !tell(processed(&info))) {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("domjobinfo".into()).spawn(body);
    thread.context("cannot start a thread").map(drop)
}

/// The bytes of `Data processed:   1.234 MiB`.
fn processed(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("Data processed:"))?;
    let (number, unit) = line.trim().split_once(' ')?;
    let shift = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|name| *name == unit)?;
    // Three digits behind the point.
    let (whole, thousandths) = number.split_once('.')?;
    let number = |digits: &str| digits.parse::<u32>().ok().map(u64::from);
    let thousandths = number(thousandths).filter(|_| thousandths.len() == 3)?;
    let number = u128::from(number(whole)? * 1000 + thousandths);
    u64::try_from((number << (10 * shift)) / 1000).ok()
}

/// Finds where a domain is whose `virsh migrate` has ended without success. `before` is its state
/// before the migration.
pub(super) fn verdict(name: &str, before: &str) -> (Outcome, String) {
    let until = Instant::now() + PATIENCE;
    loop {
        let text = match (ask(&["domstate", "--domain", name]), has_job(name)) {
            (Ok(state), Ok(false)) if state == before => {
                return (Outcome::Stayed, String::new());
            }
            (Ok(state), job) => format!(
                "libvirt's domain is '{state:.64}' here{}",
                if matches!(job, Ok(false)) { "" } else { ", and has a job" }
            ),
            (Err(error), _) => format!("{error:#}"),
        };
        if Instant::now() >= until {
            return (Outcome::InDoubt, text);
        }
        thread::sleep(Duration::from_millis(200));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_in_the_words_of_virsh() {
        let stats = "Domain: 'g1'\n  balloon.current=163840\n  balloon.maximum=163848\n";
        assert_eq!(number(stats, "balloon.current"), Some(163_840));
        assert_eq!(number(stats, "balloon.cur"), None);
        assert_eq!(number("  a=-1", "a"), None);
        let of = |text: &str| processed(&format!("Job type: x\nData processed:   {text}\n"));
        assert_eq!(of("1.500 KiB"), Some(1536));
        assert_eq!(of("7.000 B"), Some(7));
        for bad in ["", "7", "x MiB", "1.000 PiB", "-1.000 MiB", "1e9.000 MiB", "1.5 B", "NaN B"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_words_of_a_migration_have_the_flags_before_the_domain() {
        let flags = ["--persistent".to_owned()];
        let words = words("web", "b", &flags, Some(1));
        let expected = "migrate --live --persistent --bandwidth 1 --domain web --desturi b";
        assert_eq!(words, expected.split(' ').map(OsString::from).collect::<Vec<_>>());
    }
}
