//! `platen evacuate`: the VMs of a host to other hosts, each by a `platen migrate` of its own, or
//! by `virsh migrate`.
//!
//! ```text
//!  entry     --vm and --domain, and the claim on a VM
//!  domain    what virsh says of a domain
//!  flags     the options of `migrate`, passed on
//!  order     a look at each VM, and the order
//!  schedule  when the next one starts (no clock, no process)
//!  drive     the processes (child), how long each has after an interrupt (patience) and, where one
//!            fails, where its VM is (verdict)
//!  report
//! ```
//!
//! Each VM has a process of its own, so whatever ends one migration, a bug included, ends no other.
//! The processes do not need this one: if it is killed, the migrations continue, and the VMs that
//! wait stay.

mod child;
mod domain;
mod drive;
mod entry;
mod flags;
mod order;
mod patience;
mod report;
mod schedule;
mod verdict;

use crate::args::MigrateArgs;
use crate::interrupt;
use crate::network::{self, private_dir};
use crate::rate::Rate;
use crate::report_file::check_file;
use crate::say::say;
use crate::turns_option::TurnsOption;
use anyhow::{bail, ensure, Context};
use clap::{Args, FromArgMatches};
use drive::Turn;
use entry::{Entry, Way};
use flags::PassedOn;
use order::{Found, ASSUMED};
use report::{Evacuation, Outcome, VmReport};
use schedule::AtOnce;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;
use turns::{Priority, Turns};

/// The most VMs of one evacuation.
const MOST: usize = 256;
/// The highest exit status that counts VMs. Those from 101 on have other meanings.
const MOST_COUNTED: usize = 100;

/// Exit statuses, for the help.
pub(crate) const EXIT_STATUS: &str =
    "Exit status: 0 every VM has moved; else the number of VMs that have not, 100 at most. \
     Without a report: 1 or 2, and nothing was started";

/// Arguments of `platen evacuate`.
#[derive(Args, Debug)]
pub(crate) struct EvacuateArgs {
    /// Address on which `platen receive` listens, with a target for each VM by its name. A VM with
    /// an address of its own does not need it
    #[arg(long, value_name = "HOST:PORT")]
    to: Option<String>,
    /// A VM: its name, which is also that of its target at the receiver, the monitor socket of its
    /// QEMU, and after a comma the address of another receiver. Repeat it for each VM, 256 at most
    #[arg(long, required_unless_present = "domain", value_name = "NAME=unix:PATH[,HOST:PORT]")]
    vm: Vec<Entry>,
    /// A VM under libvirt, by the name of its domain: `virsh migrate --live` migrates it. With
    /// doors (`platen host doors on`) its memory goes through platen, by the settings of
    /// platen.toml. Repeatable
    #[arg(long, value_name = "NAME", value_parser = Entry::domain, requires = "libvirt")]
    domain: Vec<Entry>,
    /// libvirt of the other host, for all --domain: for example qemu+ssh://there/system
    #[arg(long, value_name = "URI")]
    libvirt: Option<String>,
    /// Option of `virsh migrate` for all --domain, for example --virsh-option=--persistent.
    /// Repeatable
    #[arg(long, value_name = "OPTION", requires = "domain", allow_hyphen_values = true)]
    virsh_option: Vec<String>,
    /// Number of VMs that migrate at once, 1 to 64 [default: one more as long as that raises the
    /// rate on the network by a tenth, 8 at most; 1 with --max-bandwidth and a --domain]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    at_once: Option<u16>,
    /// Largest rate of all migrations together, as for `migrate`. Each --domain gets an Nth of it
    /// with --at-once N [default: no limit]
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<Rate>,
    /// Share of a --vm in --max-bandwidth, 1 to 8: a VM of 8 sends twice as fast as one of 4.
    /// Without --max-bandwidth this option has no effect [default: 4]
    #[arg(long, value_name = "NAME=N", value_parser = priority)]
    priority: Vec<(String, Priority)>,
    #[command(flatten)]
    passed_on: PassedOn,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl EvacuateArgs {
    fn at_once(&self) -> AtOnce {
        match (self.at_once, self.max_bandwidth) {
            (Some(number), _) => AtOnce::Fixed(number.into()),
            // A domain keeps to its own share, and a share that nobody uses is lost.
            (None, Some(_)) if !self.domain.is_empty() => AtOnce::Fixed(1),
            (None, _) => AtOnce::Auto,
        }
    }

    /// The rate of one domain.
    fn share(&self) -> anyhow::Result<Option<Rate>> {
        let Some(Rate(all)) = self.max_bandwidth else { return Ok(None) };
        let number = u64::from(self.at_once.unwrap_or(1));
        let share = (all / number).to_string();
        let share = share.parse::<Rate>().map_err(anyhow::Error::msg);
        share.map(Some).with_context(|| {
            format!(
                "--max-bandwidth of {all} bytes per second is too little for --at-once {number}"
            )
        })
    }

    /// The migration of one VM.
    fn plan(&self, entry: &Entry, turns: &OwnedFd) -> anyhow::Result<Plan> {
        let name = &entry.name;
        let (monitor, peer) = match &entry.way {
            Way::Monitor { monitor, peer } => (monitor, peer),
            Way::Domain => {
                let uri = self.libvirt.clone().unwrap_or_default();
                let mib = self.share()?.map(|rate| rate.0 >> 20);
                let words = domain::words(name, &uri, &self.virsh_option, mib);
                return Ok(Plan { entry: entry.clone(), words, options: None, peer: uri });
            }
        };
        let peer = peer.as_deref().or(self.to.as_deref()).with_context(|| {
            format!(
                "VM {name} has no receiver: give --to HOST:PORT, or --vm \
                 {name}={monitor},HOST:PORT"
            )
        })?;
        let mut words: Vec<OsString> = vec![
            format!("--qmp={monitor}").into(),
            format!("--peer={peer}").into(),
            format!("--name={name}").into(),
        ];
        // The path is valid as long as this process lives.
        let path = format!("/proc/{}/fd/{}", std::process::id(), turns.as_raw_fd()).into();
        let priority = self.priority.iter().find(|(of, _)| of == name);
        let priority = priority.map_or_else(Priority::default, |(_, priority)| *priority);
        words.push(format!("--turns={}", TurnsOption { path, priority }).into());
        words.extend(self.passed_on.0.iter().cloned());
        let options = Some(parse(&words)?);
        Ok(Plan { entry: entry.clone(), words, options, peer: peer.to_owned() })
    }

    /// The migrations of all VMs.
    fn plans(&self, turns: &OwnedFd) -> anyhow::Result<Vec<Plan>> {
        let entries: Vec<Entry> = self.vm.iter().chain(&self.domain).cloned().collect();
        ensure!(entries.len() <= MOST, "{} VMs are given, allowed are {MOST}", entries.len());
        entry::refuse_twice(&entries)?;
        ensure!(
            !self.vm.is_empty() || self.passed_on.0.is_empty(),
            "{} has no effect on a --domain: platen.toml has the settings of libvirt's migrations",
            self.passed_on.0[0].to_string_lossy()
        );
        for (name, _) in &self.priority {
            ensure!(
                self.vm.iter().any(|entry| entry.name == *name),
                "--priority is given for {name}, but no --vm of that name"
            );
        }
        // Not too little for one of them.
        let share = self.share()?;
        let mib = share.map_or(1, |rate| rate.0 >> 20);
        ensure!(
            mib > 0 || self.domain.is_empty(),
            "--max-bandwidth leaves a --domain {} bytes per second, and virsh's --bandwidth takes \
             1048576 or more: raise it, or lower --at-once",
            share.map_or(0, |rate| rate.0)
        );
        entries.iter().map(|entry| self.plan(entry, turns)).collect()
    }
}

/// The migration of one VM.
struct Plan {
    entry: Entry,
    /// Words of `platen migrate`, or of `virsh`.
    words: Vec<OsString>,
    /// The words as `platen migrate` parses them; `None` for a domain.
    options: Option<MigrateArgs>,
    /// The other host, for the report.
    peer: String,
}

/// Parses `NAME=N`.
fn priority(text: &str) -> Result<(String, Priority), String> {
    let (name, number) = text.rsplit_once('=').ok_or("this is not NAME=N")?;
    Ok((name.to_owned(), number.parse()?))
}

/// Parses arguments of `platen migrate`.
fn parse(words: &[OsString]) -> anyhow::Result<MigrateArgs> {
    let command = MigrateArgs::augment_args(clap::Command::new("migrate").no_binary_name(true));
    let matches = command.try_get_matches_from(words)?;
    Ok(MigrateArgs::from_arg_matches(&matches)?)
}

pub(crate) fn run(args: &EvacuateArgs) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    check_file(args.json.as_deref())?;
    let turns = Turns::file(args.max_bandwidth.map(|rate| rate.0));
    let turns = turns.context("no memory for the turns of migrations")?;
    let plans = args.plans(&turns)?;
    check(plans.iter().filter_map(|plan| plan.options.as_ref()))?;
    if !args.priority.is_empty() && args.max_bandwidth.is_none() {
        say("--priority has no effect without a limit to share: give --max-bandwidth, too");
    }
    let interrupts = interrupt::counted()?;
    let folder = private_dir()?;
    let go_on = || interrupts.load(Ordering::Acquire) == 0;
    let looked = look_at(&plans, &go_on);
    let (mut turns, mut refused) = (Vec::new(), Vec::new());
    for (Plan { entry, words, peer, .. }, found) in plans.into_iter().zip(looked) {
        let mut report = VmReport::new(&entry.name, &peer);
        match found {
            Ok(found) => {
                (report.ram, report.dirty_rate) = (Some(found.ram), found.dirty);
                turns.push(Turn { entry, found, words, report });
            }
            Err(error) => {
                report.outcome = Outcome::Refused;
                report.error = Some(format!("{error:#}"));
                say(&format!("{}: refused: {error:#}", entry.name));
                refused.push(report);
            }
        }
    }
    let rate = args.max_bandwidth.map_or(ASSUMED, |rate| rate.0);
    turns.sort_by(|one, other| order::sooner(&one.found, &other.found, rate));
    tell_order(&turns, rate);
    let at_once = drive::drive(&mut turns, args.at_once(), (folder.path(), begun), &interrupts);
    let vms = turns.into_iter().map(|turn| turn.report).chain(refused).collect();
    let total = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    let report = Evacuation::new(vms, total, at_once);
    report.publish(args.json.as_deref());
    let status = report.not_moved.min(MOST_COUNTED);
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)))
}

/// Refuses options that would fail each migration in turn.
fn check<'a>(all: impl Iterator<Item = &'a MigrateArgs>) -> anyhow::Result<()> {
    let mut peers = BTreeSet::new();
    for options in all {
        let source = &options.source;
        source.settings()?;
        source.refuse_explain()?;
        options.ending.postcopy()?;
        if peers.insert(&source.peer) {
            network::connector(&source.relay.tls, &source.peer, source.peer_name.as_deref())?;
        }
    }
    Ok(())
}

/// Examines all VMs at the same time.
fn look_at(plans: &[Plan], go_on: &(dyn Fn() -> bool + Sync)) -> Vec<anyhow::Result<Found>> {
    say(&format!("looking at {} VMs for 6 s", plans.len()));
    std::thread::scope(|scope| {
        let start = |plan| {
            let Plan { entry, options, .. }: &Plan = plan;
            let look = move || order::look(entry, options.as_ref(), &|| go_on());
            std::thread::Builder::new().name("look".into()).spawn_scoped(scope, look)
        };
        let threads: Vec<_> = plans.iter().map(start).collect();
        let found = threads.into_iter().map(|thread| match thread.map(|thread| thread.join()) {
            Ok(Ok(found)) => found,
            Ok(Err(_)) => bail!("the thread that looked at it has panicked"),
            Err(error) => Err(error).context("cannot start a thread"),
        });
        found.collect()
    })
}

/// Prints the order with its figures.
fn tell_order(turns: &[Turn], rate: u64) {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    for (nth, turn) in turns.iter().enumerate() {
        let found = &turn.found;
        let dirty = found.dirty.map_or("unknown".into(), |dirty| format!("{:.1}", mib(dirty)));
        let seconds = order::converges_in(found.ram, found.dirty, rate);
        let expected = if seconds.is_finite() {
            format!("{seconds:.0} s")
        } else {
            "does not converge by itself".into()
        };
        say(&format!(
            "turn {}: {}, RAM {:.0} MiB, written to {dirty} MiB/s, by {:.0} MiB/s uncompressed: \
             {expected}",
            nth + 1,
            turn.entry.name,
            mib(found.ram as f64),
            mib(rate as f64),
        ));
    }
}
