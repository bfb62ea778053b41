//! Images of another host, which `platen serve-images` serves.

use super::*;

use std::io::{BufRead, BufReader};

/// A server of images.
struct Images {
    child: Child,
    lines: BufReader<std::process::ChildStderr>,
    /// HOST:PORT.
    address: String,
}

impl Drop for Images {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Images {
    fn serve(folder: &Path, listen: &str, flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["serve-images", folder.to_str().unwrap(), "--listen", listen])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut text = String::new();
        lines.read_line(&mut text).unwrap();
        let address = text.rsplit_once(" on ").expect(&text).1.trim().to_owned();
        Self { child, lines, address }
    }

    fn image(&self, name: &str) -> String {
        format!("platen://{}/{name}", self.address)
    }

    /// Ends the server; returns the rest of its messages.
    fn end(mut self) -> String {
        self.child.kill().unwrap();
        let mut text = String::new();
        self.lines.read_to_string(&mut text).unwrap();
        text
    }
}

const PLAIN: [&str; 1] = ["--insecure"];

/// Starts a QEMU for the saved VM, which is paused.
fn waits(folder: &Path, name: &str) -> Qemu {
    Qemu::start(folder, name, &[&MACHINE[..], &WAITS].concat()).unwrap()
}

/// Compares the RAM of a restored VM with that of an image.
#[track_caller]
fn has_ram_of(folder: &Path, vm: &Qemu, image: &str) {
    let again = format!("{}.image", vm.socket.display());
    works(folder, &["save", &again, "--qmp", &vm.address(), "--then", "quit"]);
    assert!(block(image, "pc.ram") == block(&again, "pc.ram"));
}

#[test]
fn an_image_of_another_host_is_restored_with_every_byte_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let authority = tls::Authority::at(&folder.join("ca"));
    authority.init(false).unwrap();
    let [here, there] = ["here", "127.0.0.1"]
        .map(|name| authority.issue(&[name.into()], 9, false).unwrap().dir.display().to_string());
    let flags = ["--tls-dir", &there, "--peer-name", "here"];
    let images = Images::serve(folder, "127.0.0.1:0", &flags);
    let remote = images.image("image");
    for (mode, flags) in [("instant", &["--verify"][..]), ("load", &["--load"])] {
        let vm = waits(folder, mode);
        let words = ["restore", &remote, "--qmp", &vm.address(), "--tls-dir", &here];
        let (_, report) = works(folder, &[&words[..], flags].concat());
        assert_eq!((&report["mode"], &report["vm"]), (&json!(mode), &json!("paused")));
        has_ram_of(folder, &vm, &image);
    }
    // Nobody is touched without a certificate, or for a name that is no image.
    let vm = waits(folder, "none");
    let qmp = vm.address();
    let there = ["restore", &remote, "--qmp", &qmp, "--tls-dir", &there];
    fails(folder, &there, "has none of the names");
    fails(folder, &["restore", &remote, "--qmp", &qmp, "--insecure"], "127.0.0.1");
    let key = images.image("ca/ca-key.pem");
    fails(folder, &["restore", &key, "--qmp", &qmp, "--tls-dir", &here], "no image");
    fails(folder, &["restore", "platen://x", "--qmp", &qmp], "is not platen://HOST:PORT/NAME");
    assert_eq!(vm.monitor().query_status().unwrap().status, "inmigrate");
}

/// The packs of a few saves are more files than a process may open by default.
#[test]
fn a_server_may_open_as_many_files_as_the_host_permits() {
    let dir = tempfile::tempdir().unwrap();
    let images = Images::serve(dir.path(), "127.0.0.1:0", &PLAIN);
    let limits = fs::read_to_string(format!("/proc/{}/limits", images.child.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let limits: Vec<&str> = files.split_whitespace().collect();
    assert_eq!(limits[0], limits[1], "{files}");
}

/// Succeeds as soon as the server has seen the end of whoever had the image before.
#[track_caller]
fn soon_works(folder: &Path, words: &[&str]) {
    let deadline = Instant::now() + LONG;
    loop {
        let (output, _) = platen(folder, words);
        let said = said(&output);
        if output.status.success() {
            return;
        }
        let is_held = said.contains("is in use by process");
        assert!(is_held && Instant::now() < deadline, "{words:?}: {said}");
    }
}

#[test]
fn a_save_of_a_store_on_another_host_is_in_use_until_its_vm_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    source.stop();
    let store = folder.join("store").display().to_string();
    works(folder, &["image", "init", &store]);
    let save = format!("{store}/vm");
    works(folder, &["save", &save, "--qmp", &source.address(), "--then", "quit"]);
    let images = Images::serve(folder, "127.0.0.1:0", &PLAIN);
    let remote = images.image("store/vm");
    let (first, second) = (waits(folder, "first"), waits(folder, "second"));
    let restore = Restore::held(&remote, &first, &PLAIN);
    let words = ["restore", &remote, "--qmp", &second.address(), "--insecure"];
    fails(folder, &words, "is in use by process");
    fails(folder, &[&words[..], &["--shared"]].concat(), "is in use by process");
    fails(folder, &["image", "rm", &save], "is in use by process");
    // Both processes of the restore are killed. The lock ends with their session.
    let player = rustix::process::Pid::from_raw(restore.player()).unwrap();
    drop(restore);
    rustix::process::kill_process(player, rustix::process::Signal::KILL).unwrap();
    let first_again = ["restore", &remote, "--qmp", &first.address(), "--insecure", "--recover"];
    soon_works(folder, &first_again);
    has_ram_of(folder, &first, &save);
    soon_works(folder, &words);
    has_ram_of(folder, &second, &save);
    soon_works(folder, &["image", "rm", &save]);
    assert!(images.end().is_empty());
}

/// The locks end with the server that has them. The restore reads nothing meanwhile.
#[test]
fn a_server_that_is_back_has_the_lock_of_a_restore_that_reads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let images = Images::serve(folder, "127.80.76.6:0", &PLAIN);
    let (remote, address) = (images.image("image"), images.address.clone());
    let (first, second) = (waits(folder, "first"), waits(folder, "second"));
    let mut restore = Restore::held(&remote, &first, &PLAIN);
    let wait = |locked: bool| {
        let deadline = Instant::now() + LONG;
        while is_locked(&image) != locked {
            assert!(Instant::now() < deadline, "the lock: not {locked}");
            thread::sleep(Duration::from_millis(20));
        }
    };
    wait(true);
    images.end();
    wait(false);
    let _images = Images::serve(folder, &address, &PLAIN);
    wait(true);
    let words = ["restore", &remote, "--qmp", &second.address(), "--insecure"];
    fails(folder, &words, "is in use by process");
    restore.child.kill().unwrap();
}

/// Whether a process has locked the file, by the kernel's list.
fn is_locked(path: &str) -> bool {
    let inode = format!(":{} ", std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap()));
    let locks = fs::read_to_string("/proc/locks").unwrap();
    locks.lines().any(|line| line.contains(" FLOCK ") && line.contains(&inode))
}

#[test]
fn a_restore_goes_on_when_the_server_of_its_image_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    // 8 MiB that cannot be read at once at the rate below.
    let noise = folder.join("noise");
    let mut word = 1_u64;
    let mut next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        word.to_le_bytes()[5]
    };
    fs::write(&noise, (0..8 << 20).map(|_| next()).collect::<Vec<u8>>()).unwrap();
    let loader = format!("loader,file={},addr=0x600000,force-raw=on", noise.display());
    let flags = [&MACHINE[..], &["-device", &loader]].concat();
    let Some(source) = Qemu::start(folder, "source", &flags) else { return };
    source.stop();
    let source = source.save(folder, "paused");
    drop(source);
    let image = folder.join("image").display().to_string();
    // At an address of its own: another test may get the port of one that all use.
    let images = Images::serve(folder, "127.80.76.5:0", &PLAIN);
    let address = images.address.clone();
    let mut images = Some(images);
    // A restore that is over before the server is killed needs no server. The slower ones give a
    // busy machine more time.
    for (nth, rate) in ["1M", "256K", "64K"].into_iter().enumerate() {
        let vm = waits(folder, &format!("waits{nth}"));
        let server = images.take().unwrap_or_else(|| Images::serve(folder, &address, &PLAIN));
        let mut restore = Command::new(env!("CARGO_BIN_EXE_platen"));
        restore.args(["restore", &server.image("image"), "--qmp", &vm.address(), "--insecure"]);
        let mut child = restore.args(["--push-rate", rate]).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap());
        let mut restore = Restore { child, lines, text: String::new() };
        restore.wait_for("the VM is paused");
        server.end();
        let mut line = String::new();
        while !restore.text.contains("does not answer") {
            line.clear();
            if restore.lines.read_line(&mut line).unwrap() == 0 {
                break;
            }
            restore.text.push_str(&line);
        }
        let goes_on = restore.text.contains("does not answer");
        images = goes_on.then(|| Images::serve(folder, &address, &PLAIN));
        assert!(restore.child.wait().unwrap().success(), "{}", restore.text);
        restore.lines.read_to_string(&mut restore.text).unwrap();
        if goes_on {
            assert!(restore.text.contains("answers again"), "{}", restore.text);
            return has_ram_of(folder, &vm, &image);
        }
    }
    panic!("each restore was over before its server was killed");
}
