//! The control socket, and the commands that show the service's status.

use super::activity::Activity;
use super::settings;
use super::switchboard::Carriers;
use super::ServiceArgs;
use crate::device::control;
use crate::say::{printable, printable_part, show};
use anyhow::Context;
use host::{now, Record};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(super) const STATUS: &str = "status";
pub(super) const LIST: &str = "list";

/// How long a service may take to answer: it may get little CPU.
pub(super) const ANSWERED: Duration = Duration::from_secs(30);
/// The same for a caller that asks again.
const SOON: Duration = Duration::from_secs(5);

/// The control socket of the service.
pub(super) fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

/// The service's status.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct HostStatus {
    /// Name of this host in the configuration.
    pub(super) name: String,
    /// Doors that are open.
    pub(super) doors: u64,
    /// The interception that the service's configuration asks for; null from an older service.
    #[serde(default)]
    pub(super) intercept: Option<String>,
    /// Migrations that have begun since the service started, of either role.
    pub(super) begun: u64,
    /// Connections to a door that were reset because of their user, or because too many waited.
    pub(super) refused: u64,
    /// Connections to a door that were no migration.
    pub(super) strangers: u64,
    /// Migrations that run.
    pub(super) running: Vec<Record>,
    /// The last hundred migrations that have ended; empty in `platen list`.
    pub(super) history: Vec<Record>,
}

/// Answers a request to the control socket.
pub(super) fn answer(question: &str, carriers: &Carriers, activity: &Activity) -> Option<String> {
    if ![STATUS, LIST].contains(&question) {
        return None;
    }
    let history = match question {
        STATUS => carriers.registry.history().unwrap_or_default(),
        _ => Vec::new(),
    };
    let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let status = HostStatus {
        name: carriers.settings().me().name.clone(),
        doors: load(&activity.doors),
        intercept: Some(carriers.settings().interception()),
        begun: load(&activity.source.begun) + load(&activity.destination.begun),
        refused: load(&activity.refused),
        strangers: load(&activity.strangers),
        running: carriers.registry.running(),
        history,
    };
    serde_json::to_string(&status).ok()
}

/// The folder of the service's sockets. With --run-dir the configuration is not read: it may have
/// an error by now.
pub(super) fn run_dir(args: &ServiceArgs) -> anyhow::Result<PathBuf> {
    match &args.run_dir {
        Some(run_dir) => Ok(run_dir.clone()),
        // No user is looked up: a directory service (LDAP) may not answer.
        None => settings::read(&args.config)
            .map(|config| config.run_dir)
            .context("the folder of the service is not known; --run-dir gives it"),
    }
}

/// Asks the service. Returns its answer as text and parsed.
pub(super) fn ask(args: &ServiceArgs, question: &str) -> anyhow::Result<(String, HostStatus)> {
    ask_within(args, question, ANSWERED)
}

/// As [`ask`], for a caller that asks again, and waits for less at once.
pub(super) fn ask_soon(args: &ServiceArgs, question: &str) -> anyhow::Result<(String, HostStatus)> {
    ask_within(args, question, SOON)
}

fn ask_within(
    args: &ServiceArgs,
    question: &str,
    limit: Duration,
) -> anyhow::Result<(String, HostStatus)> {
    let text = control::ask_within(&socket(&run_dir(args)?), question, limit)
        .context("the service of this host (`platen host`)")?;
    let status = serde_json::from_str(&text).context("the service's answer")?;
    Ok((text, status))
}

/// Runs `platen host status`.
pub(super) fn status(args: &ServiceArgs, json: bool) -> anyhow::Result<ExitCode> {
    let (text, status) = ask(args, STATUS)?;
    show(&if json { text } else { described(&status) })?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `platen list`.
pub(super) fn list(args: &ServiceArgs, json: bool) -> anyhow::Result<ExitCode> {
    let (text, status) = ask(args, LIST)?;
    show(&if json { text } else { table(&status.running) })?;
    Ok(ExitCode::SUCCESS)
}

fn described(status: &HostStatus) -> String {
    let mut out = format!(
        "host {}: {} doors; since the start {} migrations begun, {} connections refused, {} that were no migration\n",
        printable(&status.name),
        status.doors,
        status.begun,
        status.refused,
        status.strangers
    );
    let _ = writeln!(out, "\nrunning: {}", status.running.len());
    out.push_str(&table(&status.running));
    let _ = writeln!(out, "\nended: {}", status.history.len());
    out.push_str(&table(&status.history));
    out
}

/// Formats one line for each migration.
fn table(records: &[Record]) -> String {
    if records.is_empty() {
        return String::new();
    }
    let mut out = format!(
        "{:<22} {:<11} {:<16} {:>5} {:<16} {:<11} {:>9} {:>6} {:>8}  {}\n",
        "ID", "ROLE", "PEER", "PORT", "VM", "STATE", "MB SENT", "RATIO", "SECONDS", "CAUSE"
    );
    for record in records {
        let role = record.role.name();
        let state = record.status.map_or(record.phase.name(), host::Status::name);
        let until = record.ended.unwrap_or_else(now);
        let ratio = record.plain as f64 / record.transferred.max(1) as f64;
        let _ = writeln!(
            out,
            "{:<22} {role:<11} {:<16} {:>5} {:<16} {state:<11} {:>9.1} {ratio:>6.2} {:>8.1}  {}",
            record.id,
            printable_part(&record.peer),
            record.port,
            printable_part(record.vm.as_deref().unwrap_or("-")),
            record.transferred as f64 / 1e6,
            until.saturating_sub(record.began) as f64 / 1e3,
            printable_part(record.cause.as_deref().unwrap_or("")),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Phase, Status};

    #[test]
    fn a_line_says_what_became_of_a_migration() {
        let record = Record {
            id: "1-2-3".into(),
            peer: "b".into(),
            port: 49152,
            vm: Some("g\u{1b}1".into()),
            phase: Phase::Ended,
            began: 1000,
            ended: Some(3500),
            plain: 3_000_000,
            transferred: 1_000_000,
            status: Some(Status::Failed),
            cause: Some("the reason\n1-2-4 source".into()),
            ..Record::default()
        };
        let text = table(&[record]);
        assert_eq!(text.lines().count(), 2, "a cause is no line of its own: {text}");
        let line = text.lines().nth(1).unwrap();
        for words in ["1-2-3", "source", " b ", "49152", "failed", "1.0", "3.00", "2.5", "reason"] {
            assert!(line.contains(words), "{words}: {text}");
        }
        assert!(!text.contains('\u{1b}'));
        assert!(table(&[]).is_empty());
    }
}
