//! The device as a file, by FUSE.

use super::*;

#[test]
fn a_file_by_fuse_is_served_again_when_its_server_was_killed() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let name = disk.to_str().unwrap();
    if !may_mount() {
        return;
    }
    let served = Served::new(&["--size", "64M", "--fuse", name]);
    let image = image(16 * MIB);
    let open = || fs::File::options().read(true).write(true).open(&disk);
    open().unwrap().write_all_at(&image, 12345).unwrap();
    let pid = served.stat()["pid"].as_i64().unwrap();
    let killed = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    // Not there, then dead, then there again.
    let start = Instant::now();
    let mut got = vec![0; image.len()];
    while !open().is_ok_and(|file| file.read_exact_at(&mut got, 12345).is_ok()) {
        assert!(start.elapsed() < Duration::from_secs(300), "{}", served.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(got == image);
    served.end();
    assert_eq!(fs::metadata(&disk).unwrap().len(), 0, "unmounted");
}

/// More often than servers that die in a row are replaced.
#[test]
fn an_unmounted_file_is_mounted_again_and_no_page_is_lost() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    if !may_mount() || !have(&["mount", "umount"]) {
        return;
    }
    let served = Served::new(&["--size", "64M", "--fuse", disk.to_str().unwrap()]);
    let image = image(MIB);
    let open = || fs::File::options().read(true).write(true).open(&disk);
    open().unwrap().write_all_at(&image, 12345).unwrap();
    let pid = served.stat()["pid"].clone();
    let start = Instant::now();
    let is_mounted = || fs::metadata(&disk).is_ok_and(|file| file.len() == 64 * MIB as u64);
    let wait = |what: &dyn Fn() -> bool| {
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(300), "{}", served.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for again in 1..=10 {
        // A process that another test is starting has a copy of a file that is open here.
        wait(&|| output(Command::new("umount").arg(&disk)).status.success());
        wait(&|| served.log().matches("is mounted again").count() == again);
        let mut got = vec![0; image.len()];
        open().unwrap().read_exact_at(&mut got, 12345).unwrap();
        assert!(got == image);
    }
    // Now with a file in its place that it must not hide, written where no mount covers it.
    let beneath = tempfile::tempdir().unwrap();
    let bound = output(Command::new("mount").arg("--bind").arg(folder.path()).arg(beneath.path()));
    assert!(bound.status.success(), "{bound:?}");
    fs::write(beneath.path().join("disk"), b"mine").unwrap();
    wait(&|| output(Command::new("umount").arg(beneath.path())).status.success());
    wait(&|| output(Command::new("umount").arg(&disk)).status.success());
    wait(&|| served.log().contains("holds 4 bytes"));
    assert!(!is_mounted());
    assert_eq!(fs::read(&disk).unwrap(), b"mine");
    fs::write(&disk, b"").unwrap();
    wait(&is_mounted);
    let mut got = vec![0; image.len()];
    open().unwrap().read_exact_at(&mut got, 12345).unwrap();
    assert!(got == image);
    assert_eq!(served.stat()["pid"], pid, "another server: {}", served.log());
    let log = served.end();
    assert!(!log.contains("has died"), "{log}");
    assert!(!is_mounted());
}

/// Without a change of mounts being seen the path would be the empty file beneath for as long as a
/// process has it open.
#[test]
fn an_open_file_that_is_unmounted_is_mounted_again() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("a disk");
    if !may_mount() || !have(&["mount", "umount"]) {
        return;
    }
    let served = Served::new(&["--size", "64M", "--fuse", disk.to_str().unwrap()]);
    let open = || fs::File::options().read(true).write(true).open(&disk).unwrap();
    let had = open();
    had.write_all_at(b"before", 12345).unwrap();
    run(Command::new("umount").arg("-l").arg(&disk));
    let start = Instant::now();
    while !served.log().contains("is mounted again") {
        assert!(start.elapsed() < Duration::from_secs(300), "{}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut got = [0; 11];
    open().read_exact_at(&mut got[..6], 12345).unwrap();
    assert_eq!(&got[..6], b"before");
    // A descriptor opened before has the same device.
    had.write_all_at(b"later", 12351).unwrap();
    open().read_exact_at(&mut got, 12345).unwrap();
    assert_eq!(&got, b"beforelater");
    drop(had);
    served.end();
    assert_eq!(fs::metadata(&disk).unwrap().len(), 0, "unmounted, and nothing beneath");
}

/// Whether FUSE can be mounted here.
fn may_mount() -> bool {
    let tried = Command::new("unshare").args(["--mount", "test", "-r", "/dev/fuse"]).output();
    let may = tried.is_ok_and(|tried| tried.status.success());
    if !may {
        println!("skipped: no /dev/fuse, or nobody here may mount it");
    }
    may
}
