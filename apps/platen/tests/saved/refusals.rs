//! Images that do not fit, are in use or are damaged: refused before anything is touched.

use super::*;

#[test]
fn an_image_that_does_not_fit_is_refused_before_anything_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    let mut monitor = source.monitor();
    monitor.set_capabilities(&[("dirty-bitmaps", true)]).unwrap();
    drop(monitor);
    let other = folder.join("other").display().to_string();
    fails(folder, &["save", &other, "--qmp", &source.address()], "dirty-bitmaps");
    assert!(!Path::new(&other).exists());
    source.monitor().set_capabilities(&[("dirty-bitmaps", false)]).unwrap();
    fails(folder, &["save", &image, "--qmp", &source.address()], "exists");
    fails(folder, &["restore", &image, "--qmp", &source.address()], "-incoming defer");
    let incoming = format!("unix:{}", folder.join("incoming").display());
    let listens = [&MACHINE[..], &["-incoming", &incoming]].concat();
    let listening = Qemu::start(folder, "listens", &listens).unwrap();
    let words = ["restore", &image, "--qmp", &listening.address()];
    fails(folder, &words, "start QEMU with -incoming defer, anew for each restore");
    fails(folder, &["save", "/nowhere/image", "--qmp", &source.address()], "/nowhere/image");
    let waiting = Qemu::start(folder, "q35", &[&["-machine", "q35"][..], &WAITS].concat()).unwrap();
    fails(folder, &["restore", &image, "--qmp", &waiting.address()], "q35");
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
    // Regression: QEMU ended, and only its log said why.
    let larger = [&MACHINE[..], &["-m", "24"], &WAITS].concat();
    let larger = Qemu::start(folder, "larger", &larger).unwrap();
    let words = ["restore", &image, "--qmp", &larger.address()];
    fails(folder, &words, "RAM block pc.ram has 16.0 MiB in the image and 24.0 MiB in this QEMU");
    assert_eq!(larger.monitor().query_status().unwrap().status, "inmigrate");
    let served = ["image", "info", "platen://localhost:1/vm"];
    fails(folder, &served, "run this command on the host that serves the image");
    fs::write(&other, "no image").unwrap();
    fails(folder, &["restore", &other, "--qmp", &waiting.address()], "not an image of platen");
    let mut whole = Vec::new();
    File::open(&image).unwrap().read_to_end(&mut whole).unwrap();
    let words = ["restore", &image, "--qmp", &waiting.address(), "--copy", &other];
    fails(folder, &words, "not an image of platen");
    fs::write(&other, &whole[..whole.len() / 2]).unwrap();
    fails(folder, &["restore", &other, "--qmp", &waiting.address()], "cut off");
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
}

/// Such a QEMU does not describe its device state. A save waited for the description for ten
/// minutes, with the VM stopped.
#[test]
fn a_machine_that_suppresses_its_description_is_refused_with_the_remedy() {
    const SUPPRESS: &str = "turn it off (qom-set /machine suppress-vmdesc false)";
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let machine = ["-machine", "pc,suppress-vmdesc=on"];
    let Some(source) = Qemu::start(folder, "source", &machine) else { return };
    let path = |name: &str| folder.join(name).display().to_string();
    let (image, stream) = (path("image"), path("stream"));
    let words = ["save", &image, "--qmp", &source.address()];
    let before = settings(&source);
    fails(folder, &words, SUPPRESS);
    assert!(settings(&source) == before && !Path::new(&image).exists());
    let mut monitor = source.monitor();
    assert_eq!(monitor.query_migrate().unwrap().status(), "none");
    assert!(monitor.query_status().unwrap().running);
    // A stream without the description, as QEMU itself saves it.
    monitor.migrate(&format!("exec:cat > {stream}")).unwrap();
    drop(monitor);
    comes_to(&source, &["postmigrate"]);
    fails(folder, &["image", "import", &stream, &image], SUPPRESS);
    let mut monitor = source.monitor();
    monitor.execute("cont", None).unwrap();
    let off = json!({ "path": "/machine", "property": "suppress-vmdesc", "value": false });
    monitor.execute("qom-set", Some(off)).unwrap();
    drop(monitor);
    works(folder, &words);
    assert!(works(folder, &["image", "verify", &image]).0.contains("sound"));
}

#[test]
fn an_image_in_use_is_not_restored_again_unless_all_share_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let waits = |name| Qemu::start(folder, name, &[&MACHINE[..], &WAITS].concat()).unwrap();
    let (first, second) = (waits("first"), waits("second"));
    let mut restore = Restore::held(&image, &first, &[]);
    let player = restore.player();
    let words = ["restore", &image, "--qmp", &second.address()];
    let named = format!("image {image} is in use by process");
    fails(folder, &words, &named);
    fails(folder, &words, &format!("{player} (platen)"));
    fails(folder, &[&words[..], &["--shared"]].concat(), &named);
    fails(folder, &["restore", &image, "--qmp", &first.address(), "--recover"], &named);
    // The player continues alone, and holds the image.
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    fails(folder, &words, &format!("in use by process {player} (platen)"));
    assert_eq!(second.monitor().query_status().unwrap().status, "inmigrate");
    kill(player, &image);
    drop(first);
    let sharing = Restore::held(&image, &second, &["--shared"]);
    let third = waits("third");
    let words = ["restore", &image, "--qmp", &third.address()];
    fails(folder, &words, &named);
    works(folder, &[&words[..], &["--shared"]].concat());
    drop(sharing);
}

/// A VM gets pages of its own image only: not of another one of the same VM, given to `--recover`
/// or put in the image's place.
#[test]
fn a_vm_that_runs_gets_no_page_of_another_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    source.monitor().execute("cont", None).unwrap();
    source.stop();
    let other = folder.join("other").display().to_string();
    works(folder, &["save", &other, "--qmp", &source.address()]);
    drop(source);
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let mut restore = Restore::held(&image, &waiting, &["--copy", &copy]);
    fs::rename(&image, folder.join("kept")).unwrap();
    fs::copy(&other, &image).unwrap();
    let player = rustix::process::Pid::from_raw(restore.player()).unwrap();
    rustix::process::kill_process(player, rustix::process::Signal::KILL).unwrap();
    restore.wait_for(&format!(
        "image {image} was replaced by another one; another goes on from {copy}"
    ));
    restore.wait_for("the VM goes on");
    let player = restore.player();
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    kill(player, &copy);
    let words =
        |image| ["restore", image, "--qmp", &waiting.address(), "--recover"].map(str::to_owned);
    let refused = "was not restored from this image";
    fails(folder, &words(&other).each_ref().map(String::as_str), refused);
    works(folder, &words(&copy).each_ref().map(String::as_str));
    assert_eq!(comes_to(&waiting, &["paused"]), "paused");
    fails(folder, &words(&copy).each_ref().map(String::as_str), "nothing to recover");
}

#[test]
fn a_damaged_unit_is_found_before_qemu_is_touched_if_told_to_verify() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let before = settings(&waiting);
    let words = ["restore", &image, "--qmp", &waiting.address(), "--verify"];
    fails(folder, &words, "unit 0 (bytes 64 to");
    assert!(settings(&waiting) == before);
    let (output, report) = platen(folder, &[&words[..], &["--copy", &copy]].concat());
    assert!(output.status.success() && said(&output).contains("unit 0"), "{}", said(&output));
    assert_eq!((&report["mode"], &report["deaths"]), (&json!("instant"), &json!(0)));
}
