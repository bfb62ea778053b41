//! `platen device writeback`: by hand what the policy does by itself.

use super::args::WritebackArgs;
use super::control;
use super::stat;
use super::status::Status;
use anyhow::{bail, Context};
use policy::{PolicyStats, What};
use std::thread;
use std::time::Duration;

/// How often to look whether it is done.
const LOOK: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &WritebackArgs) -> anyhow::Result<()> {
    let folder = control::folder(args.control.run_dir.as_deref())?;
    let path = control::address(&folder, &args.name).path().to_owned();
    let ask = || -> anyhow::Result<(Status, PolicyStats)> {
        let status = stat::ask(&path).with_context(|| {
            format!("device {} is not served (no answer in {})", args.name, folder.display())
        })?;
        let policy = status.policy.context("its policy is off, or not yet there")?;
        Ok((status, policy))
    };
    let (_, before) = ask()?;
    let (word, _) =
        What::NAMES.into_iter().find(|(_, what)| *what == args.what).expect("each has a name");
    let answer = control::ask(&path, &format!("writeback {word}"))?;
    if !answer.contains("\"asked\":true") {
        bail!("device {}: {}", args.name, answer.trim());
    }
    let (status, after) = loop {
        let (status, now) = ask()?;
        if now.writeback_asked != before.writeback_asked {
            break (status, now);
        }
        thread::sleep(LOOK);
    };
    let pages = after.pages_written_back - before.pages_written_back;
    println!("{pages} pages written back, {} on the backing device", status.bd_stat.bd_count);
    let stopped = status.backing.as_ref().and_then(|backing| backing.stopped.clone());
    for (ended, why) in [
        (
            after.writeback_limited > before.writeback_limited,
            "today's writeback_limit is spent".to_owned(),
        ),
        (
            after.writeback_no_space > before.writeback_no_space,
            "its file system has no more than backing_free left".to_owned(),
        ),
        (after.writeback_full > before.writeback_full, "no block of it is free".to_owned()),
    ] {
        if ended {
            println!("not all: {why}");
        }
    }
    if after.writeback_failed > before.writeback_failed {
        bail!("{}", stopped.unwrap_or_else(|| "a write failed".to_owned()));
    }
    Ok(())
}
