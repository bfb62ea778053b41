//! The helpers of a start and of an end.

use super::*;

/// A killed helper after the first start may have done its work.
#[test]
fn the_helper_of_the_first_start_has_a_limit_and_its_failure_ends_the_device() {
    let mut shell = Shell::new(SERVER);
    shell.up = Some("exec sleep 1000".into());
    shell.down = Some("echo down >> $NOTE".into());
    shell.ready_limit = Duration::from_millis(500);
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Up(_)), "{error}");
    let noted = shell.noted();
    // The server says that it is up before its end, and when it gets a CPU.
    let order: Vec<_> = noted.lines().filter(|line| *line != "up").collect();
    assert_eq!(order, ["down", "end"], "{noted}");
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("has not ended in 500ms: killed"), "{log}");
}

/// As where another device has attached the disk: its swap areas would be taken away from it.
#[test]
fn nothing_is_taken_down_when_the_helper_of_the_first_start_has_begun_nothing() {
    let mut shell = Shell::new(SERVER);
    shell.up = Some(format!("exit {NOT_BEGUN}"));
    shell.down = Some("echo down >> $NOTE".into());
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Up(_)), "{error}");
    let noted = shell.noted();
    let order: Vec<_> = noted.lines().filter(|line| *line != "up").collect();
    assert_eq!(order, ["end"], "{noted}");
    assert!(!shell.log.borrow().iter().any(|line| line.contains("abandoned")));
}

#[test]
fn the_end_waits_for_the_helper_and_is_postponed_when_it_fails() {
    let mut shell = Shell::new(SERVER);
    shell.down = Some("echo down >> $NOTE".into());
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\ndown\nend\n");

    // The first attempt fails; the second one, after another request, succeeds.
    let mut shell = Shell::new(SERVER);
    shell.down =
        Some("if grep -q tried $NOTE; then exit 0; fi; echo tried >> $NOTE; exit 9".into());
    let (stop, ask) = UnixStream::pair().unwrap();
    stop.set_nonblocking(true).unwrap();
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        let deadline = Instant::now() + LONG;
        let noted = |text| fs::read_to_string(&note).unwrap_or_default().contains(text);
        while !noted("up") {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
        // Repeatedly, because a request before the first attempt has failed has no effect.
        while !noted("end") {
            assert!(Instant::now() < deadline);
            (&ask).write_all(b"x").unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
        ask
    });
    supervise(&mut shell, stop.as_fd()).unwrap();
    asking.join().unwrap();
    assert_eq!(shell.noted(), "up\ntried\nend\n");
    assert!(shell.log.borrow().iter().any(|line| line.contains("serving goes on")));
}

/// systemd kills a unit that neither ends nor asks for more time.
#[test]
fn an_end_that_fails_is_tried_again_while_the_service_manager_waits() {
    let mut shell = Shell::new(SERVER);
    let heard = hear_manager(&mut shell);
    shell.down =
        Some("if grep -q tried $NOTE; then exit 0; fi; echo tried >> $NOTE; exit 9".into());
    // A single request.
    run(&mut shell, "up\n").unwrap();
    let heard = heard();
    assert_eq!(shell.noted(), "up\ntried\nend\n");
    let stopping = heard.iter().position(|said| said == "STOPPING=1").unwrap();
    let (before, after) = heard.split_at(stopping);
    let asks = |said: &&String| said.starts_with("EXTEND_TIMEOUT_USEC=");
    assert_eq!(before.iter().filter(asks).count(), 0, "{heard:?}");
    assert!(after.iter().filter(asks).count() >= 3, "{heard:?}");
    assert!(after.iter().any(|said| said.starts_with("STATUS=cannot end")), "{heard:?}");
    assert_eq!(heard.iter().filter(|said| *said == "STOPPING=1").count(), 1, "{heard:?}");
    assert!(shell.log.borrow().iter().any(|line| line.contains("another attempt in 5s")));
}

/// The device is being taken down already, because its first start has failed.
#[test]
fn an_end_that_is_asked_for_after_a_failed_start_is_tried_again_too() {
    let mut shell = Shell::new(SERVER);
    let heard = hear_manager(&mut shell);
    shell.up = Some("exit 9".into());
    // The first attempt fails after the request has been heard, or in the end.
    shell.down = Some(
        "if grep -q tried $NOTE; then exit 0; fi; echo tried >> $NOTE; \
         n=0; until [ -e $NOTE.stopping ] || [ $n = 100 ]; do n=$((n + 1)); sleep 0.1; done; exit 9"
            .into(),
    );
    let (stop, ask) = UnixStream::pair().unwrap();
    stop.set_nonblocking(true).unwrap();
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(40);
        let noted = |text| fs::read_to_string(&note).unwrap_or_default().contains(text);
        while !noted("tried") {
            std::thread::sleep(Duration::from_millis(5));
        }
        (&ask).write_all(b"x").unwrap();
        while !noted("end") && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        // A supervisor that does not try again by itself ends all the same.
        let _ = (&ask).write_all(b"x");
        ask
    });
    supervise(&mut shell, stop.as_fd()).unwrap();
    asking.join().unwrap();
    let heard = heard();
    assert!(shell.log.borrow().iter().any(|line| line.contains("another attempt in 5s")));
    let noted = shell.noted();
    let order: Vec<_> = noted.lines().filter(|line| *line != "up").collect();
    assert_eq!(order, ["tried", "end"], "{noted}");
    let asks = heard.iter().filter(|said| said.starts_with("EXTEND_TIMEOUT_USEC=")).count();
    assert!(asks >= 3, "{heard:?}");
    assert_eq!(heard.iter().filter(|said| *said == "STOPPING=1").count(), 1, "{heard:?}");
}

/// Gives the service a manager. Returns what returns the manager's messages when all have been
/// sent; the manager makes a file when the service ends.
fn hear_manager(shell: &mut Shell) -> impl FnOnce() -> Vec<String> {
    let path = shell.folder.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    shell.notify = Some(path.to_str().unwrap().to_owned());
    let stopping = shell.folder.path().join("note.stopping");
    let over = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&over);
    let hearing = std::thread::spawn(move || {
        let (mut heard, mut bytes) = (Vec::new(), [0; 256]);
        loop {
            match manager.recv(&mut bytes) {
                Ok(got) => heard.push(String::from_utf8_lossy(&bytes[..got]).into_owned()),
                Err(_) if ended.load(Ordering::Acquire) => return heard,
                Err(_) => {}
            }
            if heard.last().is_some_and(|said| said == "STOPPING=1") {
                fs::write(&stopping, "").unwrap();
            }
        }
    });
    move || {
        over.store(true, Ordering::Release);
        hearing.join().unwrap()
    }
}

/// Notes `failed` and fails; notes `again` and succeeds when it is tried again.
const SECOND_UP: &str = "if [ $REPLACES = false ]; then echo up >> $NOTE; exit 0; fi; \
     if grep -q failed $NOTE; then echo again >> $NOTE; exit 0; fi; echo failed >> $NOTE; exit 1";

/// A server that is killed when `text` is noted; the next one waits for the order to end.
fn dies_at(text: &str) -> Shell {
    Shell::new(&format!(
        "echo ready >&0; \
         if [ $REPLACES = false ]; then until grep -qs {text} $NOTE; do sleep 0.01; done; kill -9 $$; fi; \
         read line; echo $line >> $NOTE",
    ))
}

#[test]
fn the_helper_of_a_later_start_is_tried_again_and_delays_no_end() {
    let mut shell = dies_at("up");
    shell.up = Some(SECOND_UP.into());
    shell.down = Some("echo down >> $NOTE".into());
    run(&mut shell, "failed\nagain\n").unwrap();
    assert_eq!(shell.noted(), "up\nfailed\nagain\ndown\nend\n");
    // A request to end does not wait until it succeeds.
    let mut shell = dies_at("up");
    shell.up = Some(
        "if [ $REPLACES = true ]; then echo failed >> $NOTE; exit 1; fi; echo up >> $NOTE".into(),
    );
    shell.down = Some("echo down >> $NOTE".into());
    run(&mut shell, "failed\n").unwrap();
    assert!(shell.noted().ends_with("failed\ndown\nend\n"), "{}", shell.noted());
}

/// It would swap to the areas again that swapoff has emptied.
#[test]
fn no_helper_of_a_later_start_runs_while_the_disk_is_taken_down() {
    // A swapoff that reads from a disk without a server ends once the disk has its next server.
    let mut shell = dies_at("down");
    shell.up = Some(
        "if [ $REPLACES = true ]; then echo swapping >> $NOTE; exit 0; fi; echo up >> $NOTE".into(),
    );
    shell.down =
        Some("echo down >> $NOTE; until [ -e $NOTE.ready ]; do sleep 0.01; done; sleep 0.5".into());
    shell.script = shell.script.replace("read line", "touch $NOTE.ready; read line");
    // Requested at any moment after "up" was recorded, also before that is known to have succeeded.
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\ndown\nend\n");
}

/// The next server's disk may be larger, for example.
#[test]
fn the_helper_of_a_later_start_runs_when_the_disk_could_not_be_taken_down() {
    let mut shell = dies_at("down");
    shell.up = Some(SECOND_UP.replace("exit 1", "exit 0"));
    shell.script = shell.script.replace("read line", "touch $NOTE.ready; read line");
    shell.down = Some(
        "if grep -q down $NOTE; then echo off >> $NOTE; exit 0; fi; echo down >> $NOTE; \
         until [ -e $NOTE.ready ]; do sleep 0.01; done; exit 9"
            .into(),
    );
    let (stop, ask) = UnixStream::pair().unwrap();
    stop.set_nonblocking(true).unwrap();
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        for text in ["up", "failed"] {
            while !fs::read_to_string(&note).unwrap_or_default().contains(text) {
                std::thread::sleep(Duration::from_millis(5));
            }
            (&ask).write_all(b"x").unwrap();
        }
        ask
    });
    supervise(&mut shell, stop.as_fd()).unwrap();
    asking.join().unwrap();
    assert_eq!(shell.noted(), "up\ndown\nfailed\noff\nend\n");
}

/// Two helpers would divide the same disk.
#[test]
fn the_helper_of_a_later_start_waits_for_the_one_of_the_first_start() {
    let mut shell = dies_at("begun");
    shell.script = shell.script.replace("read line", "touch $NOTE.ready; read line");
    shell.up = Some(
        "if [ $REPLACES = true ]; then echo later >> $NOTE; exit 0; fi; echo begun >> $NOTE; \
         until [ -e $NOTE.ready ]; do sleep 0.01; done; sleep 0.5; echo up >> $NOTE"
            .into(),
    );
    run(&mut shell, "later\n").unwrap();
    assert_eq!(shell.noted(), "begun\nup\nlater\nend\n");
}

#[test]
fn servers_without_the_kernel_s_client_are_replaced_however_many() {
    let mut shell = Shell::new(&format!(
        "echo ready >&0; echo x >> $NOTE; if [ $(wc -l < $NOTE) -lt 12 ]; then exit {CLIENT_LOST}; fi; \
         echo steady >> $NOTE; read line",
    ));
    run(&mut shell, "steady").unwrap();
    assert_eq!(shell.noted().matches('x').count(), 12);
}

#[test]
fn a_start_whose_helper_fails_ends_the_server() {
    let mut shell = Shell::new(SERVER);
    shell.up = Some("exit 5".into());
    let error = run(&mut shell, "never-mind").unwrap_err();
    assert!(matches!(error, SuperviseError::Up(status) if status.code() == Some(5)), "{error}");
    assert!(shell.noted().ends_with("end\n"), "{}", shell.noted());
}

/// The disk would be swapped to while its server ends.
#[test]
fn nothing_follows_the_start_of_a_server_that_gets_ready_after_it_was_told_to_end() {
    // The supervisor handles both lines before the exit.
    let mut shell = Shell::new(
        "echo starting >> $NOTE; read line; echo $line >> $NOTE; echo ready >&0; echo device 9 >&0",
    );
    shell.up = Some("echo swapping >> $NOTE".into());
    shell.down = Some("echo down >> $NOTE".into());
    shell.standby = Some("echo standing >> $NOTE; read line".into());
    run(&mut shell, "starting").unwrap();
    assert_eq!(shell.noted(), "starting\nend\n");
    assert_eq!(*shell.log.borrow(), ["said device 9"]);
}

/// Users of its disk, or a program that opens every new disk, would wait for ever.
#[test]
fn a_device_whose_first_server_fails_after_it_has_made_the_disk_is_abandoned() {
    let mut shell = Shell::new("echo device 9 >&0; exit 1");
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Start(_)), "{error}");
    assert_eq!(*shell.log.borrow(), ["said device 9", "abandoned"]);
    // It has made the disk, and does not end in the proper order.
    let mut shell = Shell::new("echo device 9 >&0; echo ready >&0; read line; exit 1");
    shell.up = Some("cannot be started".into());
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Io { .. }), "{error}");
    assert_eq!(shell.log.borrow().last().map(String::as_str), Some("abandoned"));
}

/// Another device may have the disk of that number now.
#[test]
fn a_device_is_abandoned_without_the_disk_that_it_has_not_set_up_or_has_taken_down() {
    const FAILS: &str = "echo ready >&0; echo up >> $NOTE; read line; exit 7";
    let not_begun = format!("exit {NOT_BEGUN}");
    for (up, down, abandoned) in [
        (None, None, "abandoned"),
        (Some(not_begun.as_str()), Some("exit 0"), "abandoned"),
        (Some("exit 0"), Some("exit 0"), "abandoned"),
        (Some("exit 0"), None, "abandoned with its disk"),
        // It may have begun before it failed.
        (Some("exit 1"), None, "abandoned with its disk"),
    ] {
        let mut shell = Shell::new(FAILS);
        (shell.up, shell.down) = (up.map(Into::into), down.map(Into::into));
        let _ = run(&mut shell, "up\n");
        let log = shell.log.borrow();
        assert_eq!(log.last().map(String::as_str), Some(abandoned), "{up:?} {down:?}: {log:?}");
        assert_eq!(log.iter().any(|line| line == "up runs"), up.is_some(), "{log:?}");
    }
}
