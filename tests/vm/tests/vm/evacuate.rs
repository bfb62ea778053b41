//! `platen evacuate`: several VMs leave a host, and the failure of one stops no other.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::{Qemu, Rate, Side, Signal, Vm, VmSpec, MACHINE_7_2};

use crate::stage::{Stage, NOTICE};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::new("evacuates_all_but_the_one_that_fails", all_but_one),
        Scenario::new("evacuates_three_at_once_within_one_limit", within_one_limit),
        Scenario::new("evacuate_interrupted_leaves_every_vm_here", interrupted),
        Scenario::new("evacuate_killed_lets_those_on_their_way_arrive", |stage| {
            without_it(stage, Signal::KILL)
        }),
        Scenario::new("evacuate_stopped_lets_those_on_their_way_arrive_and_goes_on", |stage| {
            without_it(stage, Signal::STOP)
        }),
    ]
}

const LIMIT: Duration = Duration::from_secs(400);
const NAMES: [&str; 3] = ["alpha", "beta", "gamma"];
/// Updates a second, per cent of whole pages, range in MiB: converges on a slow machine.
const GENTLE: (u64, u64, u64) = (300, 30, 8);

/// Three VMs that dirty their memory, and a receiver for some of them.
struct Host {
    vms: Vec<Vm>,
    destinations: Vec<Vm>,
    receive: Receive,
}

impl Host {
    /// `received`: how many of the VMs the receiver knows.
    fn new(stage: &mut Stage, received: usize) -> Result<Self> {
        let mut vms = Vec::new();
        for _ in NAMES {
            let mut vm = stage.lab.boot_or_load(&VmSpec::tiny(Qemu::System, MACHINE_7_2), 24)?;
            vm.guest.dirty(GENTLE.0, GENTLE.1, GENTLE.2)?;
            vms.push(vm);
        }
        let (mut destinations, mut words) = (Vec::new(), Vec::new());
        for (vm, name) in vms.iter().zip(NAMES).take(received) {
            let destination = stage.lab.incoming_for(vm)?;
            words.push("--deliver".to_owned());
            words.push(format!("{name}=unix:{}", destination.incoming_socket().display()));
            words.push("--qmp".to_owned());
            words.push(format!("{name}=unix:{}", destination.platen_monitor().display()));
            destinations.push(destination);
        }
        let flags: Vec<&str> = words.iter().map(String::as_str).collect();
        let receive = platen::receive_with(&stage.lab, Side::Destination, &flags)?;
        Ok(Self { vms, destinations, receive })
    }

    fn evacuate(&self, stage: &Stage, flags: &[&str]) -> Result<Platen> {
        let mut words = vec!["--to".to_owned(), self.receive.peer.to_string()];
        for (vm, name) in self.vms.iter().zip(NAMES) {
            words.push("--vm".into());
            words.push(format!("{name}=unix:{}", vm.platen_monitor().display()));
        }
        words.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        platen::evacuate(&stage.lab, Side::Source, &words)
    }
}

/// The VM runs, has run all the time, and every page is right.
fn is_well(vm: &mut Vm, name: &str) -> Result<()> {
    vm.assert_running().context(name.to_owned())?;
    let before = vm.guest.work("loops")?;
    vm.guest.wait_work("loops", before)?;
    vm.guest.stop()?;
    vm.guest.verify().context(name.to_owned())?;
    Ok(())
}

/// The outcomes of the VMs in the order of [`NAMES`].
fn outcomes(report: &Value) -> Vec<String> {
    let vms = report["vms"].as_array().cloned().unwrap_or_default();
    let of = |name: &&str| {
        let vm = vms.iter().find(|vm| vm["name"] == **name);
        vm.and_then(|vm| vm["outcome"].as_str()).unwrap_or("missing").to_owned()
    };
    NAMES.iter().map(of).collect()
}

fn all_but_one(stage: &mut Stage) -> Result<()> {
    let mut host = Host::new(stage, 2)?;
    stage.lab.net.shape(Rate::Mbit(200))?;
    // More than a slow machine's guest needs: this is not about the end of a migration.
    let mut evacuate = host.evacuate(stage, &["--max-downtime", "5000"])?;
    let ended = evacuate.process.wait(LIMIT)?;
    let said = evacuate.process.output();
    ensure!(
        ended.status.code() == Some(1),
        "one has failed, and it ends with {}: {said}",
        ended.status
    );
    let report = evacuate.report()?;
    ensure!(outcomes(&report) == ["moved", "moved", "stayed"], "{report}");
    ensure!(report["moved"] == 2 && report["not-moved"] == 1, "{report}");
    for vm in report["vms"].as_array().context("vms")? {
        let moved = vm["outcome"] == "moved";
        ensure!(!moved || vm["transferred"].as_u64() > Some(1 << 20), "{vm}");
        ensure!(!moved || vm["downtime"].as_u64().is_some(), "{vm}");
        let refused = vm["error"].as_str().is_some_and(|error| error.contains("refuses"));
        ensure!(moved || refused, "the cause is missing: {vm}");
    }
    for (destination, name) in host.destinations.iter_mut().zip(NAMES) {
        is_well(destination, name)?;
    }
    is_well(&mut host.vms[2], NAMES[2])
}

/// Whenever it is looked at, no more has crossed the link than the limit of all three allows.
fn within_one_limit(stage: &mut Stage) -> Result<()> {
    const RATE: u64 = 3_000_000;
    let mut host = Host::new(stage, 3)?;
    let (before, begin) = (stage.lab.net.arrived(Side::Destination)?, Instant::now());
    let limit = ["--max-bandwidth", "24mbit", "--at-once", "3", "--priority", "gamma=8"];
    let mut evacuate = host.evacuate(stage, &[&limit[..], &["--max-downtime", "5000"]].concat())?;
    let mut most: f64 = 0.0;
    while evacuate.process.poll()?.is_none() {
        let bytes = stage.lab.net.arrived(Side::Destination)? - before;
        let allowed = RATE as f64 * 1.03 * begin.elapsed().as_secs_f64() + 65536.0;
        most = most.max(bytes as f64 / allowed);
        ensure!(bytes as f64 <= allowed, "{bytes} bytes after {:?}", begin.elapsed());
        ensure!(begin.elapsed() < LIMIT, "it does not end; {}", evacuate.process.tail());
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("  {:.1} % of what is allowed", 100.0 * most);
    evacuate.succeed(NOTICE)?;
    let report = evacuate.report()?;
    ensure!(outcomes(&report) == ["moved"; 3] && report["at-once"] == 3, "{report}");
    for vm in report["vms"].as_array().context("vms")? {
        println!("  {}: {} ms, downtime {} ms", vm["name"], vm["total-time"], vm["downtime"]);
    }
    for (destination, name) in host.destinations.iter_mut().zip(NAMES) {
        is_well(destination, name)?;
    }
    Ok(())
}

/// Begins to evacuate two of three VMs, whose migrations do not end before [`Vm::let_migrate`], and
/// waits until they are under way.
fn two_on_their_way(stage: &mut Stage) -> Result<(Host, Platen)> {
    let mut host = Host::new(stage, 3)?;
    for vm in &mut host.vms {
        vm.is_reluctant()?;
    }
    stage.lab.net.shape(Rate::Mbit(40))?;
    let mut evacuate = host.evacuate(stage, &["--at-once", "2"])?;
    wait_until_under_way(stage, &mut evacuate)?;
    Ok((host, evacuate))
}

/// Waits until two VMs have started, and have sent some MiB.
fn wait_until_under_way(stage: &Stage, evacuate: &mut Platen) -> Result<()> {
    let until = Instant::now() + NOTICE;
    let mut mark = None;
    loop {
        if mark.is_none() && evacuate.process.output().matches(": starts (").count() == 2 {
            mark = Some(stage.lab.net.crossed()? + (6 << 20));
        }
        if mark.is_some_and(|mark| stage.lab.net.crossed().is_ok_and(|bytes| bytes >= mark)) {
            return Ok(());
        }
        ensure!(evacuate.process.poll()?.is_none(), "has ended; {}", evacuate.process.tail());
        ensure!(Instant::now() < until, "nothing moves; {}", evacuate.process.tail());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn interrupted(stage: &mut Stage) -> Result<()> {
    let (mut host, mut evacuate) = two_on_their_way(stage)?;
    evacuate.process.signal(Signal::INT)?;
    let ended = evacuate.process.wait(NOTICE)?;
    ensure!(ended.status.code() == Some(3), "{}: {}", ended.status, evacuate.process.output());
    let report = evacuate.report()?;
    let mut found = outcomes(&report);
    found.sort();
    ensure!(found == ["not-started", "stayed", "stayed"], "{report}");
    ensure!(report["at-once"] == 2, "{report}");
    for (vm, name) in host.vms.iter_mut().zip(NAMES) {
        is_well(vm, name)?;
    }
    Ok(())
}

/// `signal` kills or stops the command: two VMs arrive without it.
fn without_it(stage: &mut Stage, signal: Signal) -> Result<()> {
    let (mut host, mut evacuate) = two_on_their_way(stage)?;
    evacuate.process.signal(signal)?;
    if signal == Signal::KILL {
        evacuate.process.wait(NOTICE)?;
    }
    stage.lab.net.shape(Rate::Unlimited)?;
    for vm in &mut host.vms {
        vm.let_migrate()?;
    }
    let said = evacuate.process.output();
    let mut started = 0;
    for (nth, name) in NAMES.iter().enumerate() {
        if said.contains(&format!("{name}: starts")) {
            started += 1;
            host.vms[nth].wait_migration_end(&["completed"], LIMIT)?;
            is_well(&mut host.destinations[nth], name)?;
        } else {
            host.vms[nth].assert_running().context(name)?;
        }
    }
    ensure!(started == 2, "{said}");
    if signal == Signal::STOP {
        evacuate.process.signal(Signal::CONT)?;
        evacuate.succeed(LIMIT)?;
        let report = evacuate.report()?;
        ensure!(outcomes(&report) == ["moved"; 3], "{report}");
        for destination in &mut host.destinations {
            destination.assert_running()?;
        }
    }
    Ok(())
}
