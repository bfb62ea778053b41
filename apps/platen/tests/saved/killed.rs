//! Saves and players that are killed.

use super::*;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;

/// Whenever the save is killed, QEMU's settings come back. A VM with `--then continue` runs on, and
/// a file at the image's path is complete. A VM with `--then pause` is paused only if its image
/// exists.
#[test]
fn a_save_killed_at_any_moment_leaves_the_vm_and_no_half_of_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let mut monitor = source.monitor();
    monitor.set_capabilities(&[("multifd", true), ("xbzrle", true)]).unwrap();
    monitor.set_parameters(json!({ "max-bandwidth": 1 << 30, "downtime-limit": 123 })).unwrap();
    drop(monitor);
    let before = settings(&source);
    let (mut whole, mut none) = (0, 0);
    for step in 0..50 {
        let then = if step % 2 == 0 { "continue" } else { "pause" };
        let image = folder.join(format!("image{step}")).display().to_string();
        save_killed_after(folder, &source, &image, then, Duration::from_micros(step * 600));
        let states = if then == "pause" { &["running", "postmigrate"][..] } else { &["running"] };
        comes_to(&source, states);
        // The helper that restores them has let a VM without an image continue before.
        settings_come_back(&source, &before);
        let vm = comes_to(&source, states);
        if Path::new(&image).exists() {
            works(folder, &["image", "verify", &image]);
            whole += 1;
        } else {
            assert_eq!(vm, "running", "paused, and no image");
            none += 1;
        }
        if vm == "postmigrate" {
            source.monitor().execute("cont", None).unwrap();
        }
    }
    println!("{whole} saves were finished, {none} were not");
    let left = fs::read_dir(folder).unwrap().count();
    assert_eq!(left, whole + 2, "files beside the images and the monitors' sockets");
}

/// Whenever a player is killed, the restore reports that the VM has not run, or another player
/// continues and sends everything.
#[test]
fn a_player_killed_at_any_moment_is_replaced_or_the_vm_has_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let (mut replaced, mut not_run, mut ended, mut late) = (0, 0, 0, 0);
    for step in 0..16 {
        let waiting =
            Qemu::start(folder, &format!("waits{step}"), &[&MACHINE[..], &WAITS].concat()).unwrap();
        let mut restore = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["restore", &image, "--qmp", &waiting.address(), "--push-rate", "2M"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(restore.stderr.take().unwrap());
        let mut text = String::new();
        let mut killed = false;
        loop {
            let begin = text.len();
            if std::io::BufRead::read_line(&mut lines, &mut text).unwrap() == 0 {
                break;
            }
            let pid = text[begin..].strip_prefix("platen: player ");
            let pid = pid.and_then(|rest| rest.trim_end().strip_suffix(" begins"));
            if let (Some(pid), false) = (pid, killed) {
                thread::sleep(Duration::from_micros(step * step * 500));
                let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
                killed = true;
            }
        }
        let status = restore.wait().unwrap();
        let may_have_run = text.contains("the VM may have run");
        let has_ended = text.contains("this QEMU has ended") || may_have_run;
        assert_eq!(status.success(), !text.contains("before the VM ran") && !has_ended, "{text}");
        if text.contains("before the VM ran") {
            not_run += 1;
        } else if has_ended {
            // QEMU has noticed the death before it came to RUN, and ends after it.
            assert!(text.contains("the VM has run") || may_have_run, "{text}");
            ended += 1;
        } else {
            assert!(text.contains("the image is not needed any more"), "{text}");
            assert_eq!(comes_to(&waiting, &["running"]), "running");
            if text.contains("another goes on") {
                replaced += 1;
            } else {
                late += 1;
            }
        }
    }
    println!(
        "{replaced} replaced, {not_run} before the VM ran, {ended} as it ran, {late} too late"
    );
}

/// A player asks QEMU for the pages that it has, and then resumes it. One that dies in between must
/// not cost the VM: QEMU 7.2 crashes if it loses its connection then.
#[test]
fn a_player_killed_before_qemu_has_resumed_costs_no_vm() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let mut restore = Restore::held(&image, &waiting, &[]);
    let player = restore.player();
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    kill(player, &image);
    // Its name tells `--recover` the image.
    let mut monitor = Qmp::connect(&second_monitor(&waiting.socket), LONG).unwrap();
    let info = monitor.execute("query-migrate", None).unwrap();
    let name = Path::new(info["socket-address"][0]["path"].as_str().unwrap()).file_name().unwrap();
    drop(monitor);
    for nth in 0..2 {
        assert_eq!(migration(&waiting), "postcopy-paused");
        let socket = folder.join(nth.to_string()).join(name);
        fs::create_dir(socket.parent().unwrap()).unwrap();
        let mut monitor = Qmp::connect_out_of_band(&second_monitor(&waiting.socket), LONG).unwrap();
        let uri = json!({ "uri": format!("unix:{}", socket.display()) });
        // QEMU says postcopy-paused also until it has taken the connection of the round before.
        let deadline = Instant::now() + LONG;
        while let Err(error) = monitor.execute_out_of_band("migrate-recover", Some(uri.clone())) {
            assert!(Instant::now() < deadline, "{error}");
            thread::sleep(Duration::from_millis(5));
        }
        let connection = UnixStream::connect(&socket).unwrap();
        let mut player = connection.try_clone().unwrap();
        let recovery = Recovery::new(connection);
        if nth == 1 {
            // RECV_BITMAP for pc.ram; the first bytes of the answer.
            player.write_all(b"\x08\0\x0a\0\x07\x06pc.ram").unwrap();
            player.read_exact(&mut [0; 8]).unwrap();
        }
        drop(player);
        drop(recovery);
    }
    assert_eq!(migration(&waiting), "postcopy-paused");
    works(folder, &["restore", &image, "--qmp", &waiting.address(), "--recover"]);
    clones::has_ram_of(folder, &waiting, &image);
}

/// The state of QEMU's migration once it is neither active nor about to be recovered.
pub(super) fn migration(qemu: &Qemu) -> String {
    let mut monitor = Qmp::connect(&second_monitor(&qemu.socket), LONG).unwrap();
    let deadline = Instant::now() + LONG;
    loop {
        let state = monitor.execute("query-migrate", None).unwrap()["status"].clone();
        let state = state.as_str().unwrap_or_default().to_owned();
        if !["postcopy-active", "postcopy-recover", "postcopy-recover-setup"].contains(&&*state) {
            return state;
        }
        assert!(Instant::now() < deadline, "QEMU's migration stays {state}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Passes on what goes between a monitor and its client, and kills QEMU when that is told to
/// migrate: QEMU has accepted the command then, and does not connect any more.
fn kills_at_migrate(front: UnixListener, mut source: Qemu) {
    let (mut client, _) = front.accept().unwrap();
    let mut monitor = UnixStream::connect(&source.socket).unwrap();
    let (mut back, mut to) = (monitor.try_clone().unwrap(), client.try_clone().unwrap());
    // It ends with QEMU.
    let answers = thread::spawn(move || std::io::copy(&mut back, &mut to).map(drop));
    for line in BufReader::new(client.try_clone().unwrap()).lines() {
        let line = line.unwrap();
        let command: Value = serde_json::from_str(&line).unwrap();
        if command["execute"] == "migrate" {
            source.child.kill().unwrap();
            // QEMU's own answers are through before this one.
            let _ = answers.join().unwrap();
            return writeln!(client, "{}", json!({ "return": {}, "id": command["id"] })).unwrap();
        }
        writeln!(monitor, "{line}").unwrap();
    }
}

#[test]
fn a_qemu_that_ends_before_it_connects_ends_the_save() {
    for how in [&["--stop"][..], &["--channels", "2"], &["--snapshot"]] {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
        let front = folder.join("front.qmp");
        let listener = UnixListener::bind(&front).unwrap();
        let qemu = thread::spawn(move || kills_at_migrate(listener, source));
        let image = folder.join("image").display().to_string();
        let monitor = format!("unix:{}", front.display());
        let words = [&["save", &image, "--qmp", &monitor][..], how].concat();
        fails(folder, &words, "no image was made");
        assert!(!Path::new(&image).exists());
        qemu.join().unwrap();
    }
}
