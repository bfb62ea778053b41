//! `platen device writeback`: requests a writeback, which the policy otherwise starts itself.
//!
//! The server returns a ticket, and the outcome when the writeback is over. A ticket is valid for
//! one server: its successor has another generation and does not know the ticket.

use super::args::WritebackArgs;
use super::control;
use super::stat;
use crate::say::show;
use anyhow::{bail, Context};
use policy::{Asked, Outcome, Policy, What};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Interval of queries for the outcome.
const LOOK: Duration = Duration::from_millis(100);

/// Longest time without an answer: a dead server is replaced in less.
const SILENCE: Duration = Duration::from_secs(30);

/// A server's answer to `writeback` and `written`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Answer {
    generation: u64,
    ticket: u64,
    /// The outcome; `None` until the writeback is over.
    outcome: Option<Outcome>,
    error: Option<String>,
}

impl Answer {
    fn say(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings")
    }
}

/// Asks the policy to write back the pages that `what` names; returns an [`Answer`] as JSON.
/// `enabled` tells whether a policy is configured.
pub(super) fn ask(policy: Option<&Policy>, enabled: bool, generation: u64, what: &str) -> String {
    let ticket = match (what.parse::<What>(), policy) {
        (Err(error), _) => Err(error),
        (_, None) if enabled => {
            Err("its server has just begun, and its policy not yet: ask again".to_owned())
        }
        (_, None) => Err("its policy is off: enabled = false in [policy]".to_owned()),
        (Ok(what), Some(policy)) => policy.write_back(what).map_err(|error| error.to_string()),
    };
    let answer = Answer { generation, ..Answer::default() };
    match ticket {
        Ok(ticket) => Answer { ticket, ..answer }.say(),
        Err(error) => Answer { error: Some(error), ..answer }.say(),
    }
}

/// Returns the outcome for a ticket as JSON.
pub(super) fn told(policy: Option<&Policy>, generation: u64, ticket: &str) -> String {
    let number = ticket.parse().unwrap_or(0);
    let asked = policy.map_or(Asked::Unknown, |policy| policy.asked(number));
    let answer = Answer { generation, ticket: number, ..Answer::default() };
    match asked {
        Asked::Waiting => answer,
        Asked::Done(outcome) => Answer { outcome: Some(outcome), ..answer },
        Asked::Unknown => Answer { error: Some(format!("no ticket {ticket}")), ..answer },
    }
    .say()
}

pub(crate) fn run(args: &WritebackArgs) -> anyhow::Result<()> {
    let folder = control::folder(args.control.run_dir.as_deref())?;
    let path = control::address(&folder, &args.name).path().to_owned();
    let name = &args.name;
    let (word, _) =
        What::NAMES.into_iter().find(|(_, what)| *what == args.what).expect("each has a name");
    let asked = question(&path, &format!("writeback {word}"));
    let asked = asked.with_context(|| format!("device {name}"))?;
    if let Some(error) = asked.error {
        bail!("device {name}: {error}");
    }
    let outcome = wait(&path, &asked, Duration::from_secs(args.timeout))
        .with_context(|| format!("device {name}"))?;
    let status = stat::ask(&path).ok();
    let there = status.as_ref().map_or_else(String::new, |status| {
        format!(", {} on the backing device", status.bd_stat.bd_count)
    });
    show(&format!("{} pages written back{there}\n", outcome.pages))?;
    for (ended, why) in [
        (outcome.limited, "today's writeback_limit is spent"),
        (outcome.no_space, "its file system has no more than backing_free left"),
        (outcome.full, "no block of it is free"),
    ] {
        if ended {
            show(&format!("not all: {why}\n"))?;
        }
    }
    if outcome.failed {
        let stopped = status.and_then(|status| status.backing?.stopped);
        bail!("device {name}: {}", stopped.unwrap_or_else(|| "a write failed".to_owned()));
    }
    Ok(())
}

/// Waits for the outcome.
fn wait(path: &Path, asked: &Answer, limit: Duration) -> anyhow::Result<Outcome> {
    let begun = Instant::now();
    let mut heard = begun;
    loop {
        match question(path, &format!("written {}", asked.ticket)) {
            Ok(answer) if answer.generation != asked.generation => bail!(
                "its server was replaced meanwhile; the pages written by then are on the backing device, the others in memory: ask again"
            ),
            Ok(Answer { error: Some(error), .. }) => bail!(error),
            Ok(Answer { outcome: Some(outcome), .. }) => return Ok(outcome),
            Ok(_) => heard = Instant::now(),
            Err(error) if heard.elapsed() > SILENCE => {
                return Err(error.context("it does not answer any more"));
            }
            Err(_) => {}
        }
        if begun.elapsed() >= limit {
            bail!(
                "not done within {} s; it goes on, as far as `cpu` in [policy] lets it: `platen device stat` counts",
                limit.as_secs()
            );
        }
        thread::sleep(LOOK);
    }
}

fn question(path: &Path, question: &str) -> anyhow::Result<Answer> {
    let answer = control::ask(path, question)?;
    serde_json::from_str(&answer).context("the answer is of another version")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_is_off_differs_from_one_that_has_not_started() {
        let said = |enabled, what| {
            let answer: Answer = serde_json::from_str(&ask(None, enabled, 3, what)).unwrap();
            assert_eq!((answer.generation, answer.ticket), (3, 0));
            answer.error.unwrap()
        };
        assert!(said(true, "huge").contains("ask again"));
        assert!(said(false, "huge").contains("enabled = false"));
        assert!(said(true, "all").contains("none of huge"));
    }
}
