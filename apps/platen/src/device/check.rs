//! `platen device check`: the precautions of a server of swap, as the kernel sees them.

use super::args::CheckArgs;
use super::control;
use super::say::print;
use super::status::Status;
use anyhow::Context;
use std::path::PathBuf;
use std::process::ExitCode;
use swap::Subject;

pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let folder = control::folder(args.control.run_dir.as_deref())?;
    let address = control::address(&folder, &args.name);
    let answer =
        control::ask(address.path(), "stat").with_context(|| format!("device {}", args.name))?;
    let status: Status =
        serde_json::from_str(&answer).context("the answer is of another version")?;
    let disk = status
        .transports
        .iter()
        .find(|way| way.kind == "ublk" || way.kind == "kernel-nbd")
        .map(|way| PathBuf::from(&way.address));
    let pids = [status.pid, parent(status.pid)?];
    // Another program: there is no supervisor, or it was killed, and the server is on its own.
    let program = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let pids = if program(pids[0]) == program(pids[1]) { &pids[..] } else { &pids[..1] };
    let items = swap::check(&Subject { pids, disk: disk.as_deref() });
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(&items)?))?;
    } else {
        print(&items.iter().map(|item| format!("{item}\n")).collect::<String>())?;
    }
    let met = swap::all_required_met(&items);
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parent(pid: u32) -> anyhow::Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("process {pid}"))?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap_or_default();
    parent.trim().parse().with_context(|| format!("the parent of process {pid}"))
}
