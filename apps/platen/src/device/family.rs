//! The processes of a device: supervisor, server, stand-by servers.

use anyhow::Context;
use std::path::Path;

/// The processes of one device.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Family {
    pub(super) server: u32,
    pub(super) supervisor: Option<u32>,
    /// Stand-by servers.
    pub(super) standby: Vec<u32>,
}

/// Finds the processes of the device that `server` serves. The supervisor is the server's parent
/// and runs the same program; stand-by servers are its other children with a server's arguments.
/// Helpers and trainers are short-lived and omitted.
pub(super) fn family(proc: &Path, server: u32) -> anyhow::Result<Family> {
    let program = |pid: u32| std::fs::read_link(proc.join(format!("{pid}/exe"))).ok();
    let parent = parent(proc, server).with_context(|| format!("process {server}"))?;
    // The parent runs another program: there is no supervisor, or it was killed.
    if program(server).is_none() || program(server) != program(parent) {
        return Ok(Family { server, supervisor: None, standby: Vec::new() });
    }
    let mut standby = Vec::new();
    for entry in std::fs::read_dir(proc)?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // The process may have exited.
        let Ok(arguments) = std::fs::read(proc.join(format!("{pid}/cmdline"))) else { continue };
        let mut arguments = arguments.split(|&byte| byte == 0);
        let serves = arguments.any(|argument| argument == b"--inherited");
        if pid != server && serves && self::parent(proc, pid) == Some(parent) {
            standby.push(pid);
        }
    }
    standby.sort_unstable();
    Ok(Family { server, supervisor: Some(parent), standby })
}

fn parent(proc: &Path, pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(proc.join(format!("{pid}/status"))).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}
