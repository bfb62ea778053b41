//! `platen device check`: the precautions of a swap server, as the kernel reports them.

use super::args::CheckArgs;
use super::control;
use super::family::{family, Family};
use super::status::Status;
use crate::say::{say, show};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use swap::{Item, Memory, State, Subject, Weight};

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
    if disk.is_none() {
        say(&format!(
            "device {} is no disk of the kernel, to which it could swap: the items are those of a \
             device with --swap",
            args.name
        ));
    }
    let own = family(Path::new("/proc"), status.pid)?;
    let memory = Memory { ready: status.platen.mem_ready, limit: status.mm_stat.mem_limit };
    let mut items = swap::check(&Subject {
        pids: &own.pids(),
        disk: disk.as_deref(),
        memory: Some(memory),
        keeper: store::Keeper::THREAD,
    });
    items.push(own.item());
    if args.json {
        show(&format!("{}\n", serde_json::to_string_pretty(&items)?))?;
    } else {
        show(&items.iter().map(|item| format!("{item}\n")).collect::<String>())?;
    }
    let met = swap::all_required_met(&items);
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Family {
    fn pids(&self) -> Vec<u32> {
        let supervisor = self.supervisor.iter();
        std::iter::once(&self.server).chain(supervisor).chain(&self.standby).copied().collect()
    }

    /// Checks that a server that dies is replaced, even when there is no memory to start another.
    fn item(&self) -> Item {
        let (state, found) = match (self.supervisor, self.standby.as_slice()) {
            (None, _) => {
                let found =
                    "no supervisor: a server that dies is not replaced. End the device, and \
                             serve it anew";
                (State::NotMet, found.into())
            }
            (Some(_), []) => {
                let found =
                    "no server stands by: one that dies is replaced if there is memory for \
                             another. --swap starts one";
                (State::NotMet, found.into())
            }
            (Some(supervisor), [first, ..]) => {
                (State::Met, format!("{first} stands by, {supervisor} is the supervisor"))
            }
        };
        Item { name: "stand-by", state, weight: Weight::Required, found }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn process(proc: &Path, pid: u32, parent: u32, program: &str, arguments: &[&str]) {
        let folder = proc.join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("status"), format!("Name:\tx\nPPid:\t{parent}\n")).unwrap();
        std::fs::write(folder.join("cmdline"), arguments.join("\0") + "\0").unwrap();
        symlink(program, folder.join("exe")).unwrap();
    }

    #[test]
    fn standby_servers_belong_to_a_device_and_helpers_and_other_processes_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let proc = folder.path();
        let ours = "/bin/platen";
        process(proc, 5, 1, ours, &["platen", "device", "serve"]);
        process(proc, 6, 5, ours, &["platen", "device", "serve", "--inherited", "store=3"]);
        let alone = Family { server: 6, supervisor: Some(5), standby: Vec::new() };
        let found = family(proc, 6).unwrap();
        assert_eq!((&found, found.item().state), (&alone, State::NotMet));

        process(proc, 9, 5, ours, &["platen", "device", "serve", "--inherited", "store=3"]);
        process(proc, 7, 5, ours, &["platen", "device", "swap-helper", "off"]);
        process(proc, 8, 5, ours, &["platen", "device", "train"]);
        // Processes of another device.
        process(proc, 20, 1, ours, &["platen", "device", "serve"]);
        process(proc, 21, 20, ours, &["platen", "device", "serve", "--inherited", "store=3"]);
        std::fs::create_dir(proc.join("sys")).unwrap();
        let found = family(proc, 6).unwrap();
        assert_eq!(found.pids(), [6, 5, 9]);
        assert_eq!(found.item().state, State::Met);

        // A server whose supervisor was killed: its parent is now another process.
        process(proc, 1, 0, "/sbin/init", &["init"]);
        process(proc, 30, 1, ours, &["platen", "device", "serve", "--inherited", "store=3"]);
        let found = family(proc, 30).unwrap();
        assert_eq!((found.pids(), found.item().state), (vec![30], State::NotMet));
        assert!(family(proc, 31).is_err());
    }
}
