//! Written-back pages.

use super::*;

fn write_back(served: &Served, options: &[&str]) -> Command {
    let mut command = platen();
    command.args(["device", "writeback", "judged", "huge", "--run-dir"]).arg(served.path("run"));
    command.args(options);
    command
}

/// Writes back, and returns what the command prints.
fn wrote_back(served: &Served) -> String {
    let start = Instant::now();
    loop {
        let answer = output(&mut write_back(served, &[]));
        let said = String::from_utf8_lossy(&answer.stderr).into_owned();
        if answer.status.success() {
            return String::from_utf8(answer.stdout).unwrap();
        }
        // A server that stands still with the machine has not taken the request.
        let late = said.contains("it does not answer within 5 s");
        let taken = served.stat()["bd_stat"]["bd_writes"] != 0;
        assert!(late && !taken && start.elapsed() < Duration::from_secs(300), "{said}");
    }
}

#[test]
fn written_back_pages_outlive_their_server() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let folder = on_disk();
    let (policy, backing) = (folder.path().join("policy.toml"), folder.path().join("backing"));
    let section = format!(
        "[policy]\nbacking_dev = {backing:?}\nbacking_size = 41943040\nbacking_free = 0\nwriteback_limit = 9000\n"
    );
    fs::write(&policy, &section).unwrap();
    let options = ["--size", "64M", "--policy", policy.to_str().unwrap()];
    let served = Served::new(&options);
    let (image, copy) = (image(48 * MIB), served.path("copy"));
    fs::write(served.path("image"), &image).unwrap();
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    let huge = served.stat()["mm_stat"]["huge_pages"].as_u64().unwrap();
    assert!(huge > 1000);
    let said = wrote_back(&served);
    assert_eq!(said, format!("{huge} pages written back, {huge} on the backing device\n"));
    let before = served.stat();
    assert_eq!(
        (&before["bd_stat"]["bd_count"], &before["bd_stat"]["bd_writes"]),
        (&huge.into(), &huge.into())
    );
    assert_eq!(before["mm_stat"]["huge_pages"], 0);
    assert_eq!(before["backing"]["bd_written_today"], huge);
    // As the supervisor has opened it, which prints a message where there is no direct I/O.
    let direct = !served.log().contains("no direct I/O");
    assert_eq!(before["backing"]["direct"], direct);
    let compare = || {
        run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
        assert!(
            fs::read(&copy).unwrap()[..image.len()] == image,
            "what came back is not what was put in"
        );
    };
    compare();
    // No other server may have it.
    let mut second = Served::command(served.folder.path(), "other.sock", "other", &options);
    let refused = output(&mut second);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("backing is in use by another server"), "{said}");

    // Later changes of the file are for the next supervisor.
    fs::write(&policy, "[polizy]\nbacking_dev = 7").unwrap();
    replace(&served, 2);
    assert_eq!(served.stat()["bd_stat"]["bd_count"], huge);
    assert_eq!(served.stat()["backing"]["bd_written_today"], huge);
    compare();
    assert!(served.stat()["bd_stat"]["bd_reads"].as_u64().unwrap() >= huge);
    // It gets shorter, and the server is replaced: a message reports it, and pages in memory are
    // intact.
    fs::File::options().write(true).open(&backing).unwrap().set_len(40960).unwrap();
    fs::remove_file(&policy).unwrap();
    replace(&served, 3);
    // It is looked at beside what is served.
    let start = Instant::now();
    while !served.log().contains("backing has 10 blocks of 4096 bytes, its header says 10240") {
        assert!(start.elapsed() < Duration::from_secs(300), "{}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(served.log().contains("are read as far as it still has them"), "{}", served.log());
    let refused = served.stat()["backing"]["refused"].clone();
    assert!(refused.as_str().unwrap().contains("its header says 10240"), "{refused}");
    assert!(!output(Command::new("nbdcopy").arg(served.uri()).arg(&copy)).status.success());
    assert!(served.stat()["io_stat"]["failed_reads"].as_u64().unwrap() > 0);
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    compare();
    assert_eq!(served.stat()["bd_stat"]["bd_count"], 0);
    served.end();

    // Somebody's file system: the image may begin with zeros.
    fs::write(&policy, section).unwrap();
    fs::write(&backing, [7; MIB]).unwrap();
    let refused = output(&mut Served::command(folder.path(), "other.sock", "other", &options));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("backing is no backing device and not empty"), "{said}");
    assert!(fs::read(&backing).unwrap() == [7; MIB]);
}

#[test]
fn a_writeback_request_reports_that_the_server_was_replaced() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let folder = on_disk();
    let (policy, backing) = (folder.path().join("policy.toml"), folder.path().join("backing"));
    // As slow as can be.
    let keys = "backing_free = 0\nbacking_size = 41943040\nwriteback_batch_size = 1\ncpu = 1\ncpu_pressed = 1\n";
    fs::write(&policy, format!("[policy]\nbacking_dev = {backing:?}\n{keys}")).unwrap();
    let served = Served::new(&["--size", "64M", "--policy", policy.to_str().unwrap()]);
    fs::write(served.path("image"), image(48 * MIB)).unwrap();
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    let start = Instant::now();
    let ask = || write_back(&served, &[]).stderr(Stdio::piped()).spawn().unwrap();
    let mut asks = ask();
    while served.stat()["bd_stat"]["bd_writes"] == 0 {
        assert!(start.elapsed() < Duration::from_secs(300), "nothing is written back");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The server has answered it before it answered `stat`. One that got no answer in time has
    // ended.
    while asks.try_wait().unwrap().is_some() {
        let said = String::from_utf8_lossy(&asks.wait_with_output().unwrap().stderr).into_owned();
        assert!(said.contains("it does not answer within 5 s"), "{said}");
        assert!(start.elapsed() < Duration::from_secs(300), "{said}");
        asks = ask();
        served.stat();
    }
    loop {
        let late = output(&mut write_back(&served, &["--timeout", "0"]));
        let said = String::from_utf8_lossy(&late.stderr);
        assert!(!late.status.success(), "{said}");
        if said.contains("not done within 0 s") {
            break;
        }
        // A machine that stands still is no error of the server's.
        assert!(said.contains("it does not answer within 5 s"), "{said}");
        assert!(start.elapsed() < Duration::from_secs(300), "{said}");
    }
    replace(&served, 2);
    let asked = asks.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&asked.stderr);
    assert!(!asked.status.success(), "{said}");
    assert!(said.contains("device judged: its server was replaced meanwhile"), "{said}");
    served.end();
}

#[test]
fn a_mistyped_backing_device_is_refused_and_no_file_is_made_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    for (name, reason) in [
        ("/dev/platen-no-such-disk", "no file is made below /dev"),
        ("/dev/null", "neither a file nor a block device"),
    ] {
        fs::write(&policy, format!("[policy]\nbacking_dev = {name:?}\n")).unwrap();
        let options = ["--policy", policy.to_str().unwrap()];
        let refused = output(&mut Served::command(folder.path(), "s", "judged", &options));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{said}");
        assert!(said.contains(name), "{said}");
        assert!(said.contains(reason), "{name}: {said}");
    }
    assert!(!Path::new("/dev/platen-no-such-disk").exists());
}

/// The memory for the block table of a large backing device is allocated before it is needed.
#[test]
fn a_standby_server_has_the_memory_for_its_backing_device() {
    let folder = on_disk();
    let resident = |blocks: u64, least: u64| {
        let file = fs::File::create(folder.path().join("backing")).unwrap();
        file.set_len(blocks * 4096).unwrap();
        let mut command = Command::new("sh");
        let platen = Served::command(folder.path(), "s", "judged", &["--size", "1M"]);
        let words: Vec<_> = platen.get_args().map(|word| word.to_str().unwrap()).collect();
        let script = format!(
            "exec 4<>{}; exec {} {} --inherited store=3,backing=4,standby=1",
            folder.path().join("backing").display(),
            platen.get_program().to_str().unwrap(),
            words.join(" "),
        );
        // As its supervisor starts it.
        for name in ["MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX"] {
            command.env(name, if name.contains("MMAP") { "0" } else { "1" });
        }
        command.env("MALLOC_TRIM_THRESHOLD_", "1073741824");
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        command.args(["-c", &script]).stdin(std::os::fd::OwnedFd::from(theirs));
        let mut child = command.spawn().unwrap();
        drop(command);
        // Whether it sleeps, and its memory.
        let look = || {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
            let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
            let kib =
                of("VmRSS:").map_or(0, |of| of.trim().trim_end_matches(" kB").parse().unwrap());
            (of("State:").is_some_and(|state| state.contains('S')), kib)
        };
        // Until it sleeps and gets no larger, look after look: it has all that it waits with. A
        // machine that stands still may make it look so before.
        let (mut most, mut same, start) = (0, 0, Instant::now());
        while same < 100 || most < least {
            let (sleeps, now): (_, u64) = look();
            same = if sleeps && now <= most { same + 1 } else { 0 };
            most = most.max(now);
            assert!(start.elapsed() < Duration::from_secs(300), "{most} KiB, not {least}");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(ours);
        assert!(child.wait().unwrap().success());
        most
    };
    // A byte for each block.
    let small = resident(1 << 10, 12 << 10);
    resident(32 << 20, small + (31 << 10));
}
