//! The stage that scenarios share: the lab, and one booted VM that goes from scenario to scenario.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, ensure, Context, Result};
use serde_json::json;
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::table::to_f64;
use vm_tests::{Lab, Method, Patience, Qemu, Rate, Vm, VmSpec};

/// Data in the guest, in MiB.
pub(crate) const DATA_MIB: u64 = 96;

/// Data in the guest of a tiny VM, in MiB.
pub(crate) const TINY_DATA_MIB: u64 = 40;

/// The guest's load: updates a second, per cent of whole pages, range in MiB.
pub(crate) const LOAD: (u64, u64, u64) = (4000, 30, 48);

/// The time limit for all processes to notice a failure.
pub(crate) const NOTICE: Duration = Duration::from_secs(120);

/// How long a relay waits for a killed peer, which it cannot know to be gone for good. With the 3 s
/// of silence before that, longer than a busy machine puts a relay aside that is well.
pub(crate) const PATIENCE: [&str; 2] = ["--resume-timeout", "8"];

/// The reason a scenario was not run.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) &'static str);

impl std::fmt::Display for Skip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Skip {}

/// The lab, and the VM between scenarios.
pub(crate) struct Stage {
    pub(crate) lab: Lab,
    /// Paused, as the others: an idle guest under TCG takes a twentieth of a CPU.
    parked: Option<Vm>,
    /// Of other kinds than [`VmSpec::small`], the latest last.
    others: Vec<Vm>,
}

/// The most VMs of other kinds between scenarios. Some scenarios end with a VM of a kind that none
/// after them wants.
const OTHERS: usize = 3;

impl Stage {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { lab: Lab::new()?, parked: None, others: Vec::new() })
    }

    /// Before each scenario: an unlimited link that is up, no logs of others.
    pub(crate) fn prepare(&mut self) -> Result<()> {
        self.lab.net.set_up(true)?;
        self.lab.net.heal();
        self.lab.net.shape(Rate::Unlimited)?;
        Ok(())
    }

    /// A running VM, filled, idle, with QEMU's default migration settings.
    pub(crate) fn vm(&mut self) -> Result<Vm> {
        let mut vm = match self.parked.take() {
            Some(vm) => wake(vm)?,
            None => self.lab.boot_or_load(&VmSpec::small(), DATA_MIB)?,
        };
        Method::platen(&[]).prepare(&mut vm)?;
        Ok(vm)
    }

    /// Hands a VM, verified and idle, to the next scenario.
    pub(crate) fn park(&mut self, vm: Vm) {
        self.parked = pause(vm);
    }

    /// A running VM of this kind, filled with [`TINY_DATA_MIB`], idle. Its QEMU has the migration
    /// settings of the scenario before, but does not wait before the switchover.
    pub(crate) fn vm_of(&mut self, spec: &VmSpec) -> Result<Vm> {
        check_qemu(spec.qemu)?;
        match self.others.iter().position(|vm| vm.spec() == spec) {
            Some(nth) => {
                let mut vm = wake(self.others.remove(nth))?;
                // A scenario that does not ask for this would wait for ever.
                let off = json!([{ "capability": "pause-before-switchover", "state": false }]);
                let off = json!({ "capabilities": off });
                vm.monitor.execute("migrate-set-capabilities", off)?;
                Ok(vm)
            }
            None => self.lab.boot_or_load(spec, TINY_DATA_MIB),
        }
    }

    /// Hands a VM of [`Self::vm_of`], verified and idle, to the next scenario.
    pub(crate) fn park_other(&mut self, vm: Vm) {
        self.others.extend(pause(vm));
        let surplus = self.others.len().saturating_sub(OTHERS);
        self.others.drain(..surplus);
    }

    /// Ends the VMs between scenarios: after a failure their state is unknown.
    pub(crate) fn discard(&mut self) {
        self.parked = None;
        self.others.clear();
    }

    /// Prints the end of every log that was written to since `begin`, newest process last.
    pub(crate) fn print_logs(&self, begin: SystemTime) {
        let Ok(entries) = std::fs::read_dir(self.lab.folder()) else { return };
        let mut logs: Vec<_> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|e| e == "log"))
            .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
            .filter(|(modified, _)| *modified >= begin)
            .collect();
        logs.sort();
        for (_, path) in logs {
            let text = std::fs::read(&path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(8)..] {
                println!("  {}: {line}", path.file_stem().unwrap_or_default().to_string_lossy());
            }
        }
    }

    /// A migration by platen that is half way over a slow link, while the guest dirties its memory.
    pub(crate) fn half_way(&mut self, flags: &[&str]) -> Result<HalfWay> {
        let mut vm = self.vm()?;
        self.lab.net.shape(Rate::Mbit(100))?;
        let destination = self.lab.incoming_for(&vm)?;
        let receive = platen::receive(&self.lab, &destination, &PATIENCE)?;
        vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
        let crossed = self.lab.net.crossed()?;
        let flags = [flags, &PATIENCE].concat();
        vm.is_reluctant()?;
        let mut migrate = platen::migrate(&self.lab, &vm, receive.peer, &flags)?;
        vm.wait_active(&mut migrate.process)?;
        vm.hold_migration(PACE)?;
        wait_crossed(&self.lab, crossed + HALF_WAY, &mut migrate)?;
        // Half of it is still to be sent: time for the rest of the test.
        self.lab.net.shape(STAYS)?;
        let status = vm.monitor.migration_status()?;
        ensure!(status == "active", "half way, the migration is {status}");
        Ok(HalfWay { vm, destination, receive, migrate })
    }
}

/// Pauses a VM between scenarios. One that cannot be paused is of no use to any.
fn pause(mut vm: Vm) -> Option<Vm> {
    vm.monitor.execute("stop", json!({})).ok().map(|_| vm)
}

/// Lets a VM that was paused between scenarios run.
fn wake(mut vm: Vm) -> Result<Vm> {
    vm.monitor.execute("cont", json!({}))?;
    Ok(vm)
}

/// Bytes on the wire that count as half way: more than all buffers together, less than the total.
pub(crate) const HALF_WAY: u64 = 16 << 20;

/// MiB of memory that QEMU sends in a second where it is not to be over before the test says so. To
/// send again what a guest with [`LOAD`] has changed takes seconds then. Without a limit it takes a
/// tenth of one, and a guest that gets no CPU for so long has converged.
pub(crate) const PACE: u64 = 16;

/// MiB of memory that QEMU sends in a second where the first pass over a VM is not to be over
/// before the test says so. That pass takes at least [`TINY_DATA_MIB`] divided by this, whatever
/// the guest does. Behind it, a guest that gets no CPU for the time of a pass has converged.
pub(crate) const CREEP: u64 = 2;

/// A rate so low that a part of a VM can be in flight while the rest is still at the source.
pub(crate) const SLOW: Rate = Rate::Mbit(40);

/// A link so slow that the second half of a migration takes longer than any test needs.
pub(crate) const STAYS: Rate = Rate::Mbit(15);

/// Waits until the link's counter has passed `mark`.
pub(crate) fn wait_crossed(lab: &Lab, mark: u64, mover: &mut Platen) -> Result<()> {
    let deadline = Instant::now() + NOTICE;
    while lab.net.crossed()? < mark {
        if let Some(ended) = mover.process.poll()? {
            anyhow::bail!("ended with {} before half way; {}", ended.status, mover.process.tail());
        }
        ensure!(
            Instant::now() < deadline,
            "not half way after {NOTICE:?}; {}",
            mover.process.tail()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Waits until only heartbeats cross the link, and these relays have nothing to do.
pub(crate) fn wait_until_idle(lab: &Lab, relays: [&Platen; 2]) -> Result<()> {
    come_to_rest(lab, relays.map(|relay| relay.process.id()))
        .with_context(|| relays[0].process.tail())
}

/// The time limit for a link to come to rest: relays that get no CPU do not count as idle.
const RESTS: Duration = Duration::from_secs(900);

/// The same with the numbers of the processes.
pub(crate) fn come_to_rest(lab: &Lab, relays: [u32; 2]) -> Result<()> {
    let mut quiet = 0;
    let deadline = Instant::now() + RESTS;
    while Instant::now() < deadline {
        let (before, begun) = (lab.net.crossed()?, Instant::now());
        std::thread::sleep(Duration::from_millis(150));
        // If this process gets no CPU, there are heartbeats of several seconds.
        let most = HEARTBEATS * begun.elapsed().as_secs_f64().max(1.0);
        if to_f64(lab.net.crossed()? - before) > most {
            quiet = 0;
        } else if !relays.into_iter().any(waits_for_cpu) {
            // A relay that waits for a CPU may do so for a heartbeat: such a look does not count.
            quiet += 1;
        }
        if quiet == 8 {
            return Ok(());
        }
    }
    bail!("the link does not come to rest")
}

/// Waits until these relays, and a source QEMU whose VM is stopped, have nothing to do.
pub(crate) fn wait_until_written(lab: &Lab, vm: &Vm, relays: [&Platen; 2]) -> Result<()> {
    let deadline = Instant::now() + 3 * RESTS;
    loop {
        wait_until_idle(lab, relays)?;
        if !waits_for_cpu(vm.process.id()) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{} does not come to rest", vm.name());
    }
}

/// More bytes than the heartbeats of all links take in a second.
const HEARTBEATS: f64 = 4096.0;

/// Whether a thread of a process runs, or would with a CPU: on a busy machine that may take long.
fn waits_for_cpu(process: u32) -> bool {
    of_threads(process, "stat")
        .any(|stat| stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('R')))
}

/// Whether a thread of a process waits in a write, as for room in a socket.
pub(crate) fn waits_to_write(process: u32) -> bool {
    // write, writev, sendto and sendmsg.
    of_threads(process, "syscall")
        .any(|call| matches!(call.split(' ').next(), Some("1" | "20" | "44" | "46")))
}

/// A file of /proc of each thread.
fn of_threads(process: u32, file: &'static str) -> impl Iterator<Item = String> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    // A thread may end meanwhile.
    tasks.filter_map(move |task| std::fs::read_to_string(task.path().join(file)).ok())
}

/// A migration in progress.
pub(crate) struct HalfWay {
    pub(crate) vm: Vm,
    pub(crate) destination: Vm,
    pub(crate) receive: Receive,
    pub(crate) migrate: Platen,
}

/// Checks that the source runs the VM as before: its migration is in one of `states`, its guest is
/// alive and has been dirtying all the time, and every page is right.
pub(crate) fn source_goes_on(vm: &mut Vm, states: &[&str]) -> Result<()> {
    vm.wait_back(states, NOTICE).context("the source must go on")?;
    let before = vm.guest.work("loops")?;
    vm.guest.wait_work("loops", before)?;
    vm.guest.stop()?;
    vm.guest.verify().context("in the source after the failed migration")?;
    Ok(())
}

/// Checks that the destination QEMU has ended by itself, with an error.
pub(crate) fn destination_ends(destination: &mut Vm) -> Result<()> {
    let ended = destination.process.wait(NOTICE).context("the destination QEMU must end")?;
    ensure!(!ended.status.success(), "the destination QEMU reports success");
    ensure!(ended.killed_by().is_none(), "the destination QEMU crashed: {}", ended.status);
    Ok(())
}

/// Migrates the VM by platen over the unlimited link and verifies it: the failure before has left
/// no trace.
pub(crate) fn then_moves(stage: &mut Stage, mut vm: Vm) -> Result<()> {
    // Resets the test's own settings.
    vm.let_migrate()?;
    stage.lab.net.shape(Rate::Unlimited)?;
    let (mut vm, _) = Method::platen(&[])
        .run(&stage.lab, vm, Patience::Helped)
        .context("the next migration of the same VM")?;
    vm.guest.verify().context("after the next migration")?;
    stage.park(vm);
    Ok(())
}

/// Checks that an error message has one of `words`, which name the cause.
pub(crate) fn names_the_cause(message: &str, words: &[&str]) -> Result<()> {
    let lower = message.to_lowercase();
    ensure!(
        words.iter().any(|word| lower.contains(&word.to_lowercase())),
        "the error must name the cause (one of {words:?}), but it says: {message}"
    );
    Ok(())
}

/// Skips the scenario where the user does without this QEMU, and fails where it is missing.
pub(crate) fn check_qemu(qemu: Qemu) -> Result<()> {
    let Some(number) = qemu.number().filter(|_| !qemu.is_there()) else { return Ok(()) };
    let skip = format!("PLATEN_SKIP_QEMU{number}");
    if std::env::var(&skip).is_ok_and(|value| value == "1") {
        return Err(
            Skip("a QEMU is missing, as PLATEN_SKIP_QEMU10 or PLATEN_SKIP_QEMU11 says").into()
        );
    }
    bail!("there is no QEMU {number} here: `scripts/fetch-qemu {number}` fetches it")
}
