//! Saved VMs: a guest is saved and restored, and verifies every page of its memory.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use rustix::fs::{flock, FlockOperation};
use serde_json::Value;
use vm_tests::platen::Platen;
use vm_tests::{Qemu, Signal, Vm, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};

use crate::stage::{names_the_cause, Stage, LOAD, NOTICE};
use crate::Scenario;

/// Time limit for a save or a restore of a tiny VM.
pub(crate) const LIMIT: Duration = Duration::from_secs(900);

/// Options for a background so slow that little but requested pages is loaded.
pub(crate) const HELD: [&str; 2] = ["--push-rate", "4096"];

pub(crate) fn scenarios() -> Vec<Scenario> {
    let pairs = [
        ("7_to_7", Qemu::System, Qemu::System, MACHINE_7_2, 4),
        ("7_to_10", Qemu::System, Qemu::Ten, MACHINE_7_2, 4),
        ("10_to_10", Qemu::Ten, Qemu::Ten, MACHINE_10, 1),
        ("10_to_11", Qemu::Ten, Qemu::Eleven, MACHINE_10, 1),
        ("11_to_11", Qemu::Eleven, Qemu::Eleven, MACHINE_11, 4),
    ];
    let mut all = Vec::new();
    // The last number is that of the virtual CPUs where the guest's threads wait for pages at once.
    for (name, from, to, machine, cpus) in pairs {
        type Run = fn(&mut Stage, &VmSpec, &VmSpec) -> Result<()>;
        let kinds: [(&str, u32, Run); 7] = [
            ("runs_at_once", cpus, runs_at_once),
            ("hot_pages_come_first", 1, hot_pages_first),
            ("is_loaded_first", 1, is_loaded_first),
            ("second_save_of_a_store_outlives_the_first", 1, chained),
            ("plain_stream_loads", 1, plain_stream),
            ("survives_the_death_of_players", cpus, players_die),
            ("image_damaged_while_it_runs", 1, image_damaged),
        ];
        for (kind, cpus, run) in kinds {
            let spec = |qemu| VmSpec { cpus, ..VmSpec::tiny(qemu, machine) };
            let (from, to) = (spec(from), spec(to));
            all.push(Scenario::new(format!("saved_{name}_{kind}"), move |stage| {
                run(stage, &from, &to)
            }));
        }
    }
    for (name, qemu, machine) in [
        ("7", Qemu::System, MACHINE_7_2),
        ("10", Qemu::Ten, MACHINE_10),
        ("11", Qemu::Eleven, MACHINE_11),
    ] {
        let spec = VmSpec::tiny(qemu, machine);
        type Run = fn(&mut Stage, &VmSpec) -> Result<()>;
        let kinds: [(&str, Run); 9] = [
            ("qemu_killed_while_it_loads", qemu_killed),
            ("snapshot_holds_one_moment", snapshot),
            ("snapshot_killed_leaves_the_vm", snapshot_killed),
            ("goes_on_with_its_settings", |stage, spec| {
                goes_on(stage, spec, &[&["--live"], &["--stop", "--codec", "lz4"]])
            }),
            ("by_channels_goes_on_with_its_settings", |stage, spec| {
                goes_on(stage, spec, &[&["--channels", "4"], &["--stop", "--channels", "2"]])
            }),
            ("save_killed_leaves_the_vm_and_no_image", |stage, spec| save_killed(stage, spec, &[])),
            ("by_channels_save_killed_leaves_the_vm_and_no_image", |stage, spec| {
                save_killed(stage, spec, &["--channels", "4"])
            }),
            ("save_of_a_full_disk_leaves_the_vm", disk_full),
            ("what_does_not_fit_is_refused", refused),
        ];
        for (kind, run) in kinds {
            let spec = spec.clone();
            all.push(Scenario::new(format!("saved_{name}_{kind}"), move |stage| run(stage, &spec)));
        }
    }
    all
}

/// Starts `platen save`.
pub(crate) fn start_save(stage: &Stage, vm: &Vm, image: &Path, flags: &[&str]) -> Result<Platen> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let image = image.display().to_string();
    let words = [&["save", "--qmp", &qmp, &image], flags].concat();
    Platen::start(&stage.lab, "save", vm.side(), &words)
}

/// Starts `platen restore` into a QEMU that waits.
pub(crate) fn start_restore(
    stage: &Stage,
    to: &Vm,
    image: &Path,
    flags: &[&str],
) -> Result<Platen> {
    let qmp = format!("unix:{}", to.platen_monitor().display());
    let image = image.display().to_string();
    let words = [&["restore", "--qmp", &qmp, &image], flags].concat();
    Platen::start(&stage.lab, "restore", to.side(), &words)
}

/// Runs `platen image` with these arguments, and returns its output; it must succeed.
pub(crate) fn image_command(stage: &Stage, vm: &Vm, words: &[&str]) -> Result<String> {
    let mut argv = vec![vm_tests::platen::binary()?.display().to_string(), "image".into()];
    argv.extend(words.iter().map(|word| (*word).to_owned()));
    let mut process = stage.lab.spawn("image", vm.side(), &argv)?;
    let ended = process.wait(LIMIT)?;
    ensure!(ended.status.success(), "platen image {words:?} fails; {}", process.tail());
    Ok(process.output())
}

/// Saves a VM that dirties its memory, and leaves it paused; returns it and the verified image.
pub(crate) fn saved(stage: &mut Stage, spec: &VmSpec) -> Result<(Vm, PathBuf)> {
    let mut vm = stage.vm_of(spec)?;
    vm.let_migrate()?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    let image = stage.lab.scratch("image");
    let mut save = start_save(stage, &vm, &image, &["--then", "pause"])?;
    save.succeed(LIMIT)?;
    vm.wait_left()?;
    let report = save.report()?;
    ensure!(report["unsent"] == 0, "pages were not sent: {report}");
    image_command(stage, &vm, &["verify", &image.display().to_string()])?;
    Ok((vm, image))
}

/// Asserts that the guest runs, dirties its memory, and verifies every page, on all CPUs at once.
pub(crate) fn runs_whole(vm: &mut Vm) -> Result<()> {
    vm.assert_running()?;
    let before = vm.guest.work("loops")?;
    vm.guest.wait_work("loops", before)?;
    vm.guest.stop()?;
    let verified = vm.guest.verify().context("of the restored guest")?;
    let cpus = vm.spec().cpus;
    ensure!(verified.cpus == u64::from(cpus), "{cpus} CPUs were to verify: {verified:?}");
    Ok(())
}

/// As [`runs_whole`]; then parks the VM for the next scenario.
pub(crate) fn is_whole(stage: &mut Stage, mut vm: Vm) -> Result<()> {
    runs_whole(&mut vm)?;
    stage.park_other(vm);
    Ok(())
}

pub(crate) fn mode(report: &Value) -> &str {
    report["mode"].as_str().unwrap_or("none")
}

pub(crate) fn runs_at_once(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    let destination = stage.lab.incoming_with(&vm, to)?;
    drop(vm);
    let mut restore = start_restore(stage, &destination, &image, &[])?;
    restore.succeed(LIMIT)?;
    let report = restore.report()?;
    ensure!(mode(&report) == "instant", "it was not: {report}");
    is_whole(stage, destination)
}

/// A VM is restored three times. The later restores send what the earlier ones were asked for
/// before the guest runs.
fn hot_pages_first(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    for nth in 0..3 {
        let mut destination = stage.lab.incoming_with(&vm, to)?;
        // The guest asks for pages before a background as slow as this one has sent them.
        let slow = ["--push-rate", "16777216"];
        let mut restore = start_restore(stage, &destination, &image, &slow)?;
        restore.succeed(LIMIT)?;
        let report = restore.report()?;
        ensure!(mode(&report) == "instant", "it was not: {report}");
        let hot = report["hot"].as_u64().context("no number of hot pages")?;
        ensure!((nth == 0) == (hot == 0), "restore {nth}: {report}");
        runs_whole(&mut destination)?;
    }
    Ok(())
}

pub(crate) fn is_loaded_first(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    let destination = stage.lab.incoming_with(&vm, to)?;
    drop(vm);
    let mut restore = start_restore(stage, &destination, &image, &["--load"])?;
    restore.succeed(LIMIT)?;
    let report = restore.report()?;
    ensure!(mode(&report) == "load" && report["fallback"].is_null(), "it was not: {report}");
    is_whole(stage, destination)
}

/// Updates a second that a slow save does not mind.
const GENTLE: u64 = 50;

/// A guest is saved into a store, runs on, and is saved again. The first save is removed. The
/// second one is restored at once, and loaded first.
pub(crate) fn chained(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let mut vm = stage.vm_of(from)?;
    vm.let_migrate()?;
    let store = stage.lab.scratch("store");
    let (one, two) = (store.join("one"), store.join("two"));
    let text = |path: &Path| path.display().to_string();
    image_command(stage, &vm, &["init", &text(&store)])?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    let mut save = start_save(stage, &vm, &one, &[])?;
    save.succeed(LIMIT)?;
    let first = save.report()?;
    let before = vm.guest.work("loops")?;
    vm.guest.wait_work("loops", before)?;
    // A save that gets no CPU takes long, and its image then has pages twice that the guest writes.
    vm.guest.stop()?;
    vm.guest.dirty(GENTLE, LOAD.1, 16)?;
    let mut save = start_save(stage, &vm, &two, &["--then", "pause"])?;
    save.succeed(LIMIT)?;
    vm.wait_left()?;
    let second = save.report()?;
    let count = |report: &Value, what: &str| report[what].as_u64().unwrap_or(0);
    ensure!(second["unsent"] == 0 && second["damaged"] == 0, "{second}");
    ensure!(
        count(&second, "shared") > count(&second, "pages")
            && 2 * count(&second, "image-bytes") < count(&first, "image-bytes"),
        "the second save shares too little with the first: {first} {second}"
    );
    image_command(stage, &vm, &["verify", &text(&store)])?;
    image_command(stage, &vm, &["rm", &text(&one)])?;
    image_command(stage, &vm, &["verify", &text(&two)])?;
    for (flags, expected) in [(&[][..], "instant"), (&["--load"], "load")] {
        let mut destination = stage.lab.incoming_with(&vm, to)?;
        let mut restore = start_restore(stage, &destination, &two, flags)?;
        restore.succeed(LIMIT)?;
        let report = restore.report()?;
        ensure!(mode(&report) == expected, "it was not: {report}");
        runs_whole(&mut destination)?;
    }
    Ok(())
}

/// QEMU loads the output of `image export` without platen, and `image import` makes an image of the
/// same VM from it.
fn plain_stream(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    let stream = stage.lab.scratch("stream").display().to_string();
    image_command(stage, &vm, &["export", &image.display().to_string(), &stream])?;
    let again = stage.lab.scratch("image");
    image_command(stage, &vm, &["import", &stream, &again.display().to_string()])?;
    let mut destination = stage.lab.incoming_with(&vm, to)?;
    destination.listen(&format!("exec:cat {stream}"))?;
    is_whole(stage, destination)?;
    let destination = stage.lab.incoming_with(&vm, to)?;
    drop(vm);
    start_restore(stage, &destination, &again, &[])?.succeed(LIMIT)?;
    is_whole(stage, destination)
}

/// Process id of the `nth` player that this restore has started.
pub(crate) fn player(restore: &mut Platen, nth: usize) -> Result<i32> {
    let deadline = Instant::now() + NOTICE;
    loop {
        let output = restore.process.output();
        let begun: Vec<&str> = output
            .lines()
            .filter_map(|line| line.strip_prefix("platen: player ")?.strip_suffix(" begins"))
            .collect();
        if let Some(pid) = begun.get(nth) {
            return pid.parse().context("the player's number");
        }
        ensure!(Instant::now() < deadline, "no player {nth}: {output}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub(crate) fn kill(pid: i32) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid).context("no process")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).context("kill")
}

/// Players are killed while the guest runs and most of its memory is missing: each time another one
/// continues. Then the restore and its player are killed, and a second restore continues.
pub(crate) fn players_die(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    let mut destination = stage.lab.incoming_with(&vm, to)?;
    drop(vm);
    let mut restore = start_restore(stage, &destination, &image, &HELD)?;
    restore.process.wait_for_output("the VM runs", NOTICE)?;
    for nth in 0..2 {
        kill(player(&mut restore, nth)?)?;
        player(&mut restore, nth + 1)?;
    }
    // A vCPU that waits for a page may hold a lock that QEMU's monitors need to accept a new
    // client.
    destination.monitor.execute("stop", serde_json::json!({}))?;
    let last = player(&mut restore, 2)?;
    restore.process.signal(Signal::KILL)?;
    restore.process.wait(NOTICE)?;
    kill(last)?;
    // The kernel releases the player's lock of the image last.
    let file = std::fs::File::open(&image)?;
    let deadline = Instant::now() + NOTICE;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        ensure!(Instant::now() < deadline, "player {last} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(file);
    let mut second = start_restore(stage, &destination, &image, &["--recover"])?;
    second.succeed(LIMIT)?;
    let report = second.report()?;
    ensure!(mode(&report) == "instant", "it was not: {report}");
    destination.monitor.wait_migration(&["completed"], NOTICE)?;
    destination.monitor.execute("cont", serde_json::json!({}))?;
    is_whole(stage, destination)
}

/// Units are damaged while the guest runs. The restore names the first one that the guest needs,
/// sends nothing of it, and continues from a sound copy.
fn image_damaged(stage: &mut Stage, from: &VmSpec, to: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, from)?;
    let copy = stage.lab.scratch("copy");
    std::fs::copy(&image, &copy)?;
    let mut destination = stage.lab.incoming_with(&vm, to)?;
    drop(vm);
    let copied = copy.display().to_string();
    let flags = [&HELD[..], &["--copy", &copied]].concat();
    let mut restore = start_restore(stage, &destination, &image, &flags)?;
    restore.process.wait_for_output("the VM runs", NOTICE)?;
    let file = std::fs::OpenOptions::new().write(true).open(&image)?;
    let len = file.metadata()?.len();
    for at in (0..len).step_by(16 << 10).skip(1) {
        file.write_all_at(&[0x5a; 8], at)?;
    }
    restore.process.wait_for_output("another goes on from", LIMIT)?;
    let said = restore.complaints();
    for words in [&["unit "][..], &["is damaged"], &[&*copy.to_string_lossy()]] {
        names_the_cause(&said, words)?;
    }
    // The background is as slow as before: QEMU has to request the pages that the guest verifies.
    runs_whole(&mut destination)?;
    let said = restore.process.output();
    ensure!(!said.contains("not needed"), "all was loaded before the guest was verified: {said}");
    Ok(())
}

/// The restore reports that QEMU has ended. The image is unchanged and can be restored again.
fn qemu_killed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let (vm, image) = saved(stage, spec)?;
    let mut destination = stage.lab.incoming_with(&vm, spec)?;
    let mut restore = start_restore(stage, &destination, &image, &HELD)?;
    restore.process.wait_for_output("the VM runs", NOTICE)?;
    destination.process.kill()?;
    let said = restore.fail(LIMIT)?;
    names_the_cause(&said, &["this QEMU has ended"])?;
    image_command(stage, &vm, &["verify", &image.display().to_string()])?;
    let destination = stage.lab.incoming_with(&vm, spec)?;
    drop(vm);
    start_restore(stage, &destination, &image, &[])?.succeed(LIMIT)?;
    is_whole(stage, destination)
}

/// QEMU's migration capabilities and parameters.
pub(crate) fn settings(vm: &mut Vm) -> Result<Value> {
    let none = serde_json::json!({});
    let capabilities = vm.monitor.execute("query-migrate-capabilities", none.clone())?;
    Ok(serde_json::json!([capabilities, vm.monitor.execute("query-migrate-parameters", none)?]))
}

/// A VM continues after a save, with its previous settings, and the image holds its state at one
/// moment.
fn goes_on(stage: &mut Stage, spec: &VmSpec, saves: &[&[&str]]) -> Result<()> {
    for flags in saves {
        let mut vm = stage.vm_of(spec)?;
        vm.let_migrate()?;
        vm.monitor.set_capabilities(&[("multifd", true), ("xbzrle", false)])?;
        let before = settings(&mut vm)?;
        vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
        let image = stage.lab.scratch("image");
        start_save(stage, &vm, &image, flags)?.succeed(LIMIT)?;
        ensure!(settings(&mut vm)? == before, "{flags:?}: the settings are not as before");
        let destination = stage.lab.incoming_for(&vm)?;
        is_whole(stage, vm)?;
        start_restore(stage, &destination, &image, &[])?.succeed(LIMIT)?;
        is_whole(stage, destination)?;
    }
    // `is_whole` has parked both source and destination.
    stage.discard();
    Ok(())
}

/// A guest writes while it is saved with --snapshot, which a slow codec holds open. It runs on, and
/// the image holds its state at one moment.
fn snapshot(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    let before = settings(&mut vm)?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    let loops = vm.guest.work("loops")?;
    let image = stage.lab.scratch("image");
    let slow = ["--snapshot", "--level", "12", "--compress-threads", "1"];
    let mut save = start_save(stage, &vm, &image, &slow)?;
    save.succeed(LIMIT)?;
    let report = save.report()?;
    ensure!(report["unsent"] == 0 && report["superseded"] == 0, "a page came twice: {report}");
    vm.guest.wait_work("loops", loops)?;
    ensure!(settings(&mut vm)? == before, "the settings are not as before");
    image_command(stage, &vm, &["verify", &image.display().to_string()])?;
    let destination = stage.lab.incoming_for(&vm)?;
    is_whole(stage, vm)?;
    start_restore(stage, &destination, &image, &[])?.succeed(LIMIT)?;
    is_whole(stage, destination)?;
    // `is_whole` has parked both source and destination.
    stage.discard();
    Ok(())
}

/// A save with --snapshot is stopped while the guest writes, and killed. QEMU's thread that waits
/// for a page then needs the rest of the stream to be read.
fn snapshot_killed(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    let before = settings(&mut vm)?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    let image = stage.lab.scratch("image");
    let slow = ["--snapshot", "--level", "19", "--compress-threads", "1"];
    let mut save = start_save(stage, &vm, &image, &slow)?;
    vm.wait_active(&mut save.process)?;
    save.process.signal(Signal::STOP)?;
    save.process.signal(Signal::KILL)?;
    save.process.wait(NOTICE)?;
    vm.wait_back(&["completed"], LIMIT)?;
    ensure!(!image.exists(), "a save that was killed left an image");
    let deadline = Instant::now() + LIMIT;
    while settings(&mut vm)? != before {
        ensure!(Instant::now() < deadline, "the settings are not as before");
        std::thread::sleep(Duration::from_millis(20));
    }
    is_whole(stage, vm)
}

/// A save is slowed down, so that it stays in progress, and killed. Its VM continues, and QEMU gets
/// its former settings back.
fn save_killed(stage: &mut Stage, spec: &VmSpec, flags: &[&str]) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    vm.monitor.set_capabilities(&[("multifd", true), ("xbzrle", false)])?;
    let before = settings(&mut vm)?;
    let image = stage.lab.scratch("image");
    let mut save = start_save(stage, &vm, &image, flags)?;
    vm.wait_active(&mut save.process)?;
    vm.hold_migration(1)?;
    save.process.signal(Signal::KILL)?;
    save.process.wait(NOTICE)?;
    vm.wait_back(&["failed", "cancelled"], NOTICE)?;
    ensure!(!image.exists(), "a save that was killed left an image");
    // `hold_migration` has set these at another monitor, so they stay.
    let held = ["downtime-limit", "max-bandwidth"].map(|name| (name, &before[1][name]));
    let held = serde_json::to_value(std::collections::BTreeMap::from(held))?;
    vm.monitor.execute("migrate-set-parameters", held)?;
    let deadline = Instant::now() + LIMIT;
    while settings(&mut vm)? != before {
        ensure!(Instant::now() < deadline, "the settings are not as before");
        std::thread::sleep(Duration::from_millis(20));
    }
    vm.let_migrate()?;
    is_whole(stage, vm)
}

fn disk_full(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    for flags in [&["--live"][..], &["--snapshot"], &["--channels", "4"]] {
        full(stage, spec, flags)?;
    }
    Ok(())
}

fn full(stage: &mut Stage, spec: &VmSpec, flags: &[&str]) -> Result<()> {
    let mut vm = stage.vm_of(spec)?;
    vm.let_migrate()?;
    vm.guest.dirty(LOAD.0, LOAD.1, 16)?;
    let folder = stage.lab.scratch("small");
    std::fs::create_dir(&folder)?;
    rustix::mount::mount(
        "none",
        &folder,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        Some(c"size=4m"),
    )
    .context("a small disk")?;
    let image = folder.join("image");
    let outcome = start_save(stage, &vm, &image, flags).and_then(|mut save| save.fail(LIMIT));
    let left = image.exists();
    rustix::mount::unmount(&folder, rustix::mount::UnmountFlags::DETACH)?;
    let said = outcome?;
    names_the_cause(&said, &["No space"])?;
    ensure!(!said.contains("monitor unix:"), "the disk is at fault, and no QEMU: {said}");
    ensure!(!left, "a save that failed left an image");
    is_whole(stage, vm)
}

/// Refused before anything is changed: another machine type, RAM of another size, a QEMU that does
/// not wait, an existing file. Refused by QEMU, before the VM runs: a CPU that it does not have.
fn refused(stage: &mut Stage, spec: &VmSpec) -> Result<()> {
    let spec = &VmSpec { cpus: 2, ..spec.clone() };
    let (mut vm, image) = saved(stage, spec)?;
    let said = start_save(stage, &vm, &image, &[])?.fail(LIMIT)?;
    names_the_cause(&said, &["postmigrate"])?;
    vm.monitor.execute("cont", serde_json::json!({}))?;
    let said = start_save(stage, &vm, &image, &[])?.fail(LIMIT)?;
    names_the_cause(&said, &["exists"])?;
    let said = start_restore(stage, &vm, &image, &[])?.fail(LIMIT)?;
    names_the_cause(&said, &["-incoming defer"])?;

    let other = VmSpec { machine: "pc-q35-6.2", ..spec.clone() };
    let mut destination = stage.lab.incoming_with(&vm, &other)?;
    let before = settings(&mut destination)?;
    let said = start_restore(stage, &destination, &image, &[])?.fail(LIMIT)?;
    names_the_cause(&said, &["pc-q35-6.2"])?;
    ensure!(settings(&mut destination)? == before, "a refused restore has changed settings");
    drop(destination);

    let other = VmSpec { memory_kib: spec.memory_kib + (8 << 10), ..spec.clone() };
    let mut destination = stage.lab.incoming_with(&vm, &other)?;
    let before = settings(&mut destination)?;
    for flags in [&["--load"][..], &[]] {
        let said = start_restore(stage, &destination, &image, flags)?.fail(LIMIT)?;
        names_the_cause(&said, &["RAM block"])?;
    }
    ensure!(settings(&mut destination)? == before, "a refused restore has changed settings");
    drop(destination);

    let other = VmSpec { cpus: 1, ..spec.clone() };
    for flags in [&["--load"][..], &[]] {
        let mut destination = stage.lab.incoming_with(&vm, &other)?;
        let said = start_restore(stage, &destination, &image, flags)?.fail(LIMIT)?;
        names_the_cause(&said, &["closed its socket", "could not load the VM"])?;
        // QEMU 10.0 sometimes ends by SIGSEGV, after "load of migration failed".
        let ended = destination.process.wait(LIMIT).context("the destination QEMU must end")?;
        ensure!(!ended.status.success(), "the destination QEMU reports success");
        let may_crash = spec.qemu == Qemu::Ten;
        ensure!(may_crash || ended.killed_by().is_none(), "QEMU crashed: {}", ended.status);
    }
    is_whole(stage, vm)
}
