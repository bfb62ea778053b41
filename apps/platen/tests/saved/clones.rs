//! Several VMs from one image by one `platen restore`.

use super::*;
use rustix::process::{kill_process, Pid, Signal};

/// QEMUs that wait, each with these options.
fn waiting(folder: &Path, names: &[&str], extra: &[&str]) -> Vec<Qemu> {
    let flags = [&MACHINE[..], &WAITS, extra].concat();
    names.iter().map(|name| Qemu::start(folder, name, &flags).unwrap()).collect()
}

/// The arguments of a restore of `image` into these QEMUs.
fn words(image: &str, into: &[Qemu], flags: &[&str]) -> Vec<String> {
    let mut words = vec!["restore".to_owned(), image.to_owned()];
    for qemu in into {
        words.extend(["--qmp".to_owned(), qemu.address()]);
    }
    words.extend(flags.iter().map(|&flag| flag.to_owned()));
    words
}

fn restore(folder: &Path, image: &str, into: &[Qemu], flags: &[&str]) -> (Output, Value) {
    let words = words(image, into, flags);
    platen(folder, &words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// A restore into several QEMUs, as it runs.
fn begin(image: &str, into: &[Qemu], flags: &[&str]) -> Restore {
    let mut child = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(words(image, into, flags))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(child.stderr.take().unwrap());
    Restore { child, lines, text: String::new() }
}

/// A restore whose background is held back for ever, as soon as each of these paused VMs could run.
fn held(image: &str, into: &[Qemu]) -> Restore {
    let mut restore = begin(image, into, &["--push-rate", "1"]);
    for qemu in into {
        restore.wait_for(&format!("{}: the VM is paused", qemu.address()));
        qemu.wait_paused();
    }
    restore
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Saves the VM, and asserts that its RAM is that of `image`.
#[track_caller]
pub(super) fn has_ram_of(folder: &Path, qemu: &Qemu, image: &str) {
    let again = folder.join("again").display().to_string();
    let _ = fs::remove_file(&again);
    works(folder, &["save", &again, "--qmp", &qemu.address(), "--then", "quit"]);
    assert!(block(&again, "pc.ram") == block(image, "pc.ram"), "{}", qemu.address());
}

fn statuses(report: &Value) -> Vec<&str> {
    let clones = report["clones"].as_array().unwrap();
    clones.iter().map(|clone| clone["status"].as_str().unwrap()).collect()
}

#[test]
fn several_vms_share_one_player_that_decodes_each_unit_once() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let units = image::Image::open(Path::new(&image)).unwrap().index().units.len();
    let vms = waiting(folder, &["vm-1", "vm-2", "vm-3"], &[]);
    let numbered = format!("unix:{}", folder.join("vm-{n}.qmp").display());
    let words = ["restore", &image, "--qmp", &numbered, "--clones", "3"];
    let (output, report) = platen(folder, &words);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("platen: player ").count(), 1, "{text}");
    assert_eq!(report["status"], "completed");
    for (vm, clone) in vms.iter().zip(report["clones"].as_array().unwrap()) {
        assert_eq!((&clone["qmp"], &clone["vm"]), (&json!(vm.address()), &json!("paused")));
        assert_eq!((&clone["mode"], &clone["deaths"]), (&json!("instant"), &json!(0)));
        assert_eq!(text.matches(&format!("{}: the VM is paused", vm.address())).count(), 1);
    }
    let player = &report["players"][0];
    let decoded = player["decoded-units"].as_u64().unwrap();
    assert!(0 < decoded && decoded <= units as u64, "{decoded} of {units}: {player}");
    assert!(player["peak-memory-bytes"].as_u64().unwrap() > 0, "{player}");
    vms.iter().for_each(|vm| has_ram_of(folder, vm, &image));
}

#[test]
fn the_pages_that_several_vms_ask_for_are_one_hot_set() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let hot_pages = || {
        let (text, _) = works(folder, &["image", "info", &image, "--json"]);
        serde_json::from_str::<Value>(&text).unwrap()["hot-pages"].as_u64().unwrap()
    };
    let slow = ["--push-rate", "262144"];
    let sum = |report: &Value, what: &str| -> u64 {
        let clones = report["clones"].as_array().unwrap();
        clones.iter().map(|clone| clone[what].as_u64().unwrap()).sum()
    };
    let deadline = Instant::now() + LONG;
    let report = loop {
        let vms = waiting(folder, &["a", "b"], &[]);
        let (output, report) = restore(folder, &image, &vms, &slow);
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(sum(&report, "hot"), 0);
        // VMs that get no CPU ask for nothing before all pages have been sent.
        if sum(&report, "requests") > 0 {
            break report;
        }
        assert!(Instant::now() < deadline, "{report}");
    };
    let pages = hot_pages();
    assert!(0 < pages && pages <= sum(&report, "requests"), "{pages}: {report}");
    let vms = waiting(folder, &["c", "d"], &[]);
    let (_, report) = restore(folder, &image, &vms, &slow);
    assert_eq!(sum(&report, "hot"), 2 * pages, "{report}");
}

#[test]
fn vms_that_would_write_to_one_file_are_refused_before_any_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let [disk, own, link] = ["disk", "own", "link"].map(|name| folder.join(name));
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    fs::copy(&disk, &own).unwrap();
    fs::hard_link(&disk, &link).unwrap();
    let start = |name: &str, disk: &Path, more: &str, extra: &[&str]| {
        let file = format!("driver=file,node-name=disk,filename={}{more}", disk.display());
        let flags = ["-blockdev", &file, "-device", "virtio-blk-pci,drive=disk"];
        Qemu::start(folder, name, &[&MACHINE[..], &flags, extra].concat())
    };
    let Some(source) = start("source", &disk, "", &[]) else { return };
    // The VM that was saved goes on, and writes to its disk.
    let source = source.save(folder, "running");
    let image = folder.join("image").display().to_string();
    let two = [start("one", &disk, "", &WAITS).unwrap(), start("two", &link, "", &WAITS).unwrap()];
    let before = two.each_ref().map(settings);
    let refused = |into: &[Qemu], expected: &str| {
        let (output, _) = restore(folder, &image, into, &[]);
        let text = said(&output);
        assert!(!output.status.success() && text.contains(expected), "{expected}: {text}");
        assert!(text.contains("--i-have-overlays"), "{text}");
    };
    let both = format!("the VMs at {} and {} would all write", two[0].address(), two[1].address());
    refused(&two, &both);
    refused(&two, &format!("process {} (qemu-system", source.child.id()));
    drop(source);
    refused(&two, &both);
    for (qemu, before) in two.iter().zip(&before) {
        assert_eq!(qemu.monitor().query_status().unwrap().status, "inmigrate");
        assert!(settings(qemu) == *before);
    }
    let [one, two] = two;
    drop(two);
    // Files of their own: nothing is refused.
    let two = [one, start("three", &own, "", &WAITS).unwrap()];
    let (output, report) = restore(folder, &image, &two, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(!said(&output).contains("warning"), "{}", said(&output));
    assert_eq!(statuses(&report), ["completed", "completed"]);
    drop(two);
    // The operator knows better: here all stay paused, since a QEMU has locked the file. Two that
    // took it at the same moment have both run, and neither had the locks that keep others out.
    let _holder = start("holder", &disk, "", &[]).unwrap();
    let two =
        [start("four", &disk, "", &WAITS).unwrap(), start("five", &link, "", &WAITS).unwrap()];
    let (output, report) = restore(folder, &image, &two, &["--i-have-overlays"]);
    assert!(output.status.success() && said(&output).contains("warning: the VMs at"));
    let states: Vec<_> = report["clones"].as_array().unwrap().iter().map(|vm| &vm["vm"]).collect();
    assert_eq!(states, [&json!("paused"); 2], "{report}");
    assert!(said(&output).contains("could not take a disk"), "{}", said(&output));
}

#[test]
fn vms_with_one_mac_address_or_uuid_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let net = ["-netdev", "hubport,id=net,hubid=0"];
    let card = |mac: &str| format!("virtio-net-pci,netdev=net,mac={mac}");
    let start = |name: &str, mac: &str, uuid: &str, extra: &[&str]| {
        let device = card(mac);
        let own = ["-device", &device, "-uuid", uuid];
        Qemu::start(folder, name, &[&MACHINE[..], &net, &own, extra].concat())
    };
    let [mac, uuid] = ["52:54:00:00:00:0a", "11111111-2222-3333-4444-555555555555"];
    let Some(source) = start("source", mac, uuid, &[]) else { return };
    let image = folder.join("image").display().to_string();
    works(folder, &["save", &image, "--qmp", &source.address(), "--then", "quit"]);
    let other = ["52:54:00:00:00:0b", "11111111-2222-3333-4444-555555555556"];
    let vms = [
        start("one", mac, uuid, &WAITS).unwrap(),
        start("two", other[0], other[1], &WAITS).unwrap(),
        start("three", mac, uuid, &WAITS).unwrap(),
    ];
    let (output, _) = restore(folder, &image, &vms, &[]);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let both = format!("the VMs at {} and {} have", vms[0].address(), vms[2].address());
    for what in
        [format!("warning: {both} MAC address {mac}"), format!("warning: {both} UUID {uuid}")]
    {
        assert!(text.contains(&what), "{what}: {text}");
    }
    assert_eq!(text.matches("warning").count(), 2, "{text}");
}

/// One QEMU has a VM already, one has other RAM, one is killed meanwhile: the others get theirs.
#[test]
fn a_vm_that_fails_does_not_stop_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    let mut vms = waiting(folder, &["one", "two"], &[]);
    vms.insert(1, source);
    vms.push(
        Qemu::start(folder, "large", &[&MACHINE[..], &WAITS, &["-m", "32"]].concat()).unwrap(),
    );
    let (output, report) = restore(folder, &image, &vms, &[]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("2 of 4 VMs have failed"), "{text}");
    assert_eq!(report["status"], "partial");
    assert_eq!(statuses(&report), ["completed", "failed", "completed", "failed"]);
    let why = report["clones"][1]["error"].as_str().unwrap();
    assert!(why.contains("-incoming defer"), "{why}");
    let said_by = format!("{}: monitor {}: the VM is ", vms[1].address(), vms[1].address());
    assert!(text.contains(&said_by), "{text}");
    has_ram_of(folder, &vms[0], &image);
    has_ram_of(folder, &vms[2], &image);
    drop(vms);

    let mut vms = waiting(folder, &["killed", "three"], &[]);
    let mut restore = held(&image, &vms);
    vms[0].child.kill().unwrap();
    vms[0].child.wait().unwrap();
    restore.wait_for(&format!("{}: monitor", vms[0].address()));
    assert!(restore.text.contains("this QEMU has ended"), "{}", restore.text);
    // The player serves the other one still, and another player finishes it.
    let player = restore.player();
    signal(player.cast_unsigned(), Signal::KILL);
    restore.wait_for("another goes on");
    assert!(restore.text.contains(&format!("{}: the player", vms[1].address())));
}

/// A QEMU that is stopped gets nothing, and the others get everything. It gets the rest later.
///
/// Regression: the first VM that had everything caused the message that the image was not needed
/// any more.
#[test]
fn a_vm_that_is_stopped_does_not_delay_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let vms = waiting(folder, &["stopped", "one", "two"], &[]);
    let mut restore = begin(&image, &vms, &["--push-rate", "262144"]);
    restore.wait_for(&format!("{}: the VM is paused", vms[0].address()));
    signal(vms[0].child.id(), Signal::STOP);
    for vm in &vms[1..] {
        restore.wait_for(&format!("{}: everything is loaded", vm.address()));
        has_ram_of(folder, vm, &image);
    }
    const NEEDED: &str = "the image is not needed any more";
    assert!(!restore.text.contains(NEEDED), "{}", restore.text);
    signal(vms[0].child.id(), Signal::CONT);
    restore.wait_for(&format!("{}: everything is loaded", vms[0].address()));
    assert!(!restore.text.contains(NEEDED), "{}", restore.text);
    restore.lines.read_to_string(&mut restore.text).unwrap();
    assert_eq!(restore.text.matches(NEEDED).count(), 1, "{}", restore.text);
    assert!(restore.child.wait().unwrap().success());
    has_ram_of(folder, &vms[0], &image);
}

#[test]
fn a_player_of_several_vms_killed_at_any_moment_is_replaced_for_each() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let (mut replaced, mut not_run, mut late) = (0, 0, 0);
    // `make test` sets this: four of the ten moments, from the first to the last.
    let stride = if std::env::var_os("PLATEN_QUICK").is_some() { 3 } else { 1 };
    for step in (0..10_u64).step_by(stride) {
        let names = [format!("a{step}"), format!("b{step}"), format!("c{step}")];
        let vms = waiting(folder, &names.each_ref().map(String::as_str), &[]);
        let mut restore = begin(&image, &vms, &["--push-rate", "4M"]);
        restore.wait_for(" begins");
        thread::sleep(Duration::from_micros(step * step * 1000));
        let player = Pid::from_raw(restore.player()).unwrap();
        // It fails if the player has ended already.
        let _ = kill_process(player, Signal::KILL);
        restore.lines.read_to_string(&mut restore.text).unwrap();
        let (status, text) = (restore.child.wait().unwrap(), &restore.text);
        let mut failed = 0;
        for vm in &vms {
            let address = vm.address();
            if text.contains(&format!("{address}: everything is loaded")) {
                has_ram_of(folder, vm, &image);
                match text.contains(&format!("{address}: the player was ended")) {
                    true => replaced += 1,
                    false => late += 1,
                }
            } else {
                let named = format!("{address}: monitor {address}: ");
                let known = ["before the VM ran", "the VM may have run"];
                let is_known = known.iter().any(|words| text.contains(words));
                assert!(text.contains(&named) && is_known, "{text}");
                failed += 1;
            }
        }
        assert_eq!(status.success(), failed == 0, "{text}");
        not_run += failed;
    }
    println!("{replaced} replaced, {not_run} before the VM ran, {late} too late");
}

/// The restore dies and the player goes on; both die and `--recover` finishes all VMs.
#[test]
fn several_vms_are_recovered() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let vms = waiting(folder, &["one", "two"], &[]);
    let mut restore = held(&image, &vms);
    let player = restore.player();
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    // The player goes on, and holds the image.
    fails(folder, &["restore", &image, "--qmp", &vms[0].address()], "is in use by process");
    kill(player, &image);
    let (output, report) = self::restore(folder, &image, &vms, &["--recover"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(statuses(&report), ["completed", "completed"]);
    vms.iter().for_each(|vm| has_ram_of(folder, vm, &image));
}

#[test]
fn several_vms_go_on_from_a_copy_when_the_image_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    let vms = waiting(folder, &["one", "two"], &[]);
    let mut restore = begin(&image, &vms, &["--push-rate", "1", "--copy", &copy]);
    for vm in &vms {
        restore.wait_for(&format!("{}: the VM is paused", vm.address()));
        vm.wait_paused();
    }
    let file = File::options().write(true).open(&image).unwrap();
    for at in (64 + 30..file.metadata().unwrap().len() - 4096).step_by(512) {
        file.write_all_at(b"#", at).unwrap();
    }
    // Whoever goes on reads the image anew, and finds it damaged.
    signal(restore.player().cast_unsigned(), Signal::KILL);
    for vm in &vms {
        restore.wait_for(&format!("{}: the VM goes on", vm.address()));
        let from = format!("another goes on from {copy}");
        let has_copy = |line: &str| line.contains(&vm.address()) && line.contains(&from);
        assert!(restore.text.lines().any(has_copy), "{}", restore.text);
    }
    let player = restore.player();
    drop(restore);
    kill(player, &copy);
    let (output, _) = self::restore(folder, &copy, &vms, &["--recover"]);
    assert!(output.status.success(), "{}", said(&output));
    vms.iter().for_each(|vm| has_ram_of(folder, vm, &copy));
}

#[test]
fn several_vms_are_loaded_first() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let vms = waiting(folder, &["one", "two"], &[]);
    let (output, report) = restore(folder, &image, &vms, &["--load"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(statuses(&report), ["completed", "completed"]);
    for (vm, report) in vms.iter().zip(report["clones"].as_array().unwrap()) {
        assert_eq!((&report["mode"], &report["vm"]), (&json!("load"), &json!("paused")));
        has_ram_of(folder, vm, &image);
    }
    assert_eq!(report["players"], json!([]));
}
