//! `platen host doors`: the lines of libvirt's qemu.conf that give this host its door address.

use super::settings::Settings;
use super::ServiceArgs;
use crate::args::OnOff;
use crate::say::show;
use anyhow::{ensure, Context};
use clap::Args;
use host::{doors_off, doors_on, QEMU_CONF};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// PATH is not used, since root runs the program.
const SYSTEMCTL: &str = "/usr/bin/systemctl";
/// The units of libvirt's daemon of QEMU.
const LIBVIRTS: [&str; 2] = ["virtqemud.service", "libvirtd.service"];

#[derive(Args)]
pub(super) struct DoorsArgs {
    /// Write the lines (on), or remove them (off)
    #[arg(value_enum, value_name = "on|off")]
    what: OnOff,
    #[command(flatten)]
    service: ServiceArgs,
    /// libvirt's configuration of QEMU
    #[arg(long, value_name = "FILE", default_value = QEMU_CONF)]
    qemu_conf: PathBuf,
    /// Restart libvirtd or virtqemud by systemctl, whichever runs: running VMs go on
    #[arg(long)]
    restart: bool,
}

pub(super) fn run(args: &DoorsArgs) -> anyhow::Result<ExitCode> {
    let path = args.qemu_conf.display();
    let changed = match args.what {
        OnOff::On => {
            let settings = Settings::new(&args.service)?;
            doors_on(&args.qemu_conf, settings.me().door, &settings.me().ports.0)?
        }
        OnOff::Off => doors_off(&args.qemu_conf)?,
    };
    let state = if changed { "was changed" } else { "is as it should be" };
    let next = match (args.restart, changed) {
        // The daemon may not have read a former change.
        (true, _) => restarted(Path::new(SYSTEMCTL))?,
        (false, true) => ". Restart libvirtd (or virtqemud): running VMs go on".into(),
        (false, false) => String::new(),
    };
    show(&format!("{path} {state}{next}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Restarts the daemons that run. One that does not run reads the file when it starts. Returns a
/// sentence on the result.
fn restarted(systemctl: &Path) -> anyhow::Result<String> {
    let call = |words: &[&str]| {
        let status = Command::new(systemctl).args(words).status();
        let status = status.with_context(|| format!("cannot run {}", systemctl.display()))?;
        anyhow::Ok(status.success())
    };
    let mut said = String::new();
    for unit in LIBVIRTS {
        if call(&["is-active", "--quiet", unit])? {
            ensure!(
                call(&["restart", unit])?,
                "the file is written, and systemctl restart {unit} failed (journalctl -u {unit})"
            );
            said.push_str(&format!(". {unit} was restarted"));
        }
    }
    if said.is_empty() {
        said = format!(". Neither {} nor {} runs", LIBVIRTS[0], LIBVIRTS[1]);
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `restarted` with a systemctl of this text. Also returns the calls of systemctl.
    fn with_systemctl(text: &str) -> (anyhow::Result<String>, String) {
        let folder = tempfile::tempdir().unwrap();
        let (program, log) = (folder.path().join("systemctl"), folder.path().join("log"));
        let text = format!("#!/bin/sh\necho \"$*\" >>'{}'\n{text}\n", log.display());
        // Written by another process: one that another test is starting would have a copy of a
        // file that is open for writing here, and the kernel does not execute such a file.
        let make = ["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""];
        let made = Command::new("/bin/sh").args(make).arg(&program).arg(text).status().unwrap();
        assert!(made.success());
        let said = restarted(&program);
        (said, std::fs::read_to_string(&log).unwrap())
    }

    #[test]
    fn the_daemon_of_libvirt_that_runs_is_restarted() {
        let (said, calls) = with_systemctl("[ \"$1 $3\" != 'is-active virtqemud.service' ]");
        assert_eq!(said.unwrap(), ". libvirtd.service was restarted");
        assert!(!calls.contains("restart virtqemud"), "{calls}");
        assert!(calls.ends_with("is-active --quiet libvirtd.service\nrestart libvirtd.service\n"));
        let (said, calls) = with_systemctl("exit 3");
        assert!(said.unwrap().contains("Neither") && !calls.contains("restart"), "{calls}");
        let (said, _) = with_systemctl("[ \"$1\" = is-active ]");
        let error = said.unwrap_err().to_string();
        assert!(error.contains("restart virtqemud.service failed"), "{error}");
        assert!(restarted(Path::new("/nonexistent/systemctl")).is_err());
    }
}
