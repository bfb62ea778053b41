//! Servers that hang, do not get ready or do not end: killed and replaced.

use super::*;

/// Runs a server that hangs in this way, replaced by one that does not; returns the messages.
fn replaced(first: &str) -> String {
    let mut shell = Shell::new(&format!(
        "if [ $REPLACES = false ]; then {first}; fi; echo ready >&0; echo second >> $NOTE; read line"
    ));
    let pulse = Pulse::file().unwrap();
    shell.pulse = Some((Pulse::open(&pulse).unwrap(), pulse));
    let start = Instant::now();
    run(&mut shell, "second").unwrap();
    println!("replaced after {:?}", start.elapsed());
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("the server hangs: ") && log.contains("(signal: 9"), "{log}");
    log
}

#[test]
fn a_server_that_is_stopped_is_killed_and_replaced() {
    let log = replaced("echo ready >&0; kill -STOP $$");
    assert!(log.contains("it has been stopped (SIGSTOP)"), "{log}");
    assert!(!log.contains("hung: slot"), "{log}");
}

#[test]
fn a_server_with_a_thread_that_sleeps_in_a_request_is_killed_and_replaced() {
    let log = replaced(&format!("export {HANGS}=sleeps; exec $HANG"));
    assert!(log.contains("sleeps in a request, and nothing wakes it"), "{log}");
    // The service knows it before the next server starts.
    assert!(log.find("hung: slot 5\n") < log.find("the server has died"), "{log}");
    assert!(log.contains("hung: slot 5\n"), "{log}");
}

#[test]
fn a_server_with_a_thread_that_spins_is_killed_and_replaced() {
    let log = replaced(&format!("export {HANGS}=spins; exec $HANG"));
    // The second, where others leave it less than 1.5 s of the CPUs in a minute.
    let noticed = ["over one page", "has done no page in 60 s"].map(|why| log.contains(why));
    assert!(noticed.contains(&true), "{log}");
}

/// The disk may be slow: a thread that waits for it does not count as hung.
#[test]
fn a_server_that_waits_for_a_disk_is_not_killed() {
    let mut shell = Shell::new(&format!("export {HANGS}=waits; exec $HANG"));
    shell.up = Some("sleep 12; echo still >> $NOTE".into());
    let pulse = Pulse::file().unwrap();
    shell.pulse = Some((Pulse::open(&pulse).unwrap(), pulse));
    run(&mut shell, "still").unwrap();
    assert!(!shell.log.borrow().iter().any(|line| line.contains("hangs")), "{:?}", shell.log);
}

#[test]
fn a_standby_that_hangs_when_it_is_needed_is_killed_and_replaced() {
    let mut shell = Shell::new(
        "if [ $REPLACES = false ]; then echo ready >&0; \
           until grep -q standing $NOTE; do sleep 0.01; done; kill -9 $$; fi; \
         echo ready >&0; until [ -e ${NOTE%note}replaced ]; do sleep 0.01; done; \
         echo fresh >> $NOTE; read line; echo $line >> $NOTE",
    );
    // The end is asked for when the supervisor knows that the server is ready: one that is late is
    // killed, and another one follows.
    shell.standby = Some(
        "echo standing $$ >> $NOTE; read line; if [ \"$line\" ]; then exec sleep 1000; fi".into(),
    );
    shell.ready_limit = Duration::from_secs(2);
    run(&mut shell, "fresh").unwrap();
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("\nthe server does not get ready: killed\n"), "{log}");
    // Counted as a death: the second in a row.
    assert!(log.contains("starting another in 50ms"), "{log}");
    let noted = shell.noted();
    // The first of two.
    let hung = noted.lines().find_map(|line| line.strip_prefix("standing ")).unwrap();
    assert!(!PathBuf::from(format!("/proc/{hung}")).exists(), "{noted}");
    assert!(noted.contains("end\n"), "{noted}");
}

#[test]
fn a_standby_that_has_ended_is_replaced() {
    let mut shell = Shell::new("echo ready >&0; read line; echo $line >> $NOTE");
    // The first one finds no memory, for example.
    shell.standby = Some(
        "echo standing >> $NOTE; if [ $(grep -c standing $NOTE) = 1 ]; then exit 1; fi; \
         echo again >> $NOTE; read line"
            .into(),
    );
    run(&mut shell, "again").unwrap();
    assert_eq!(shell.noted(), "standing\nstanding\nagain\nend\n");
    assert!(!shell.log.borrow().iter().any(|line| line.contains("died")), "{:?}", shell.log);
}

#[test]
fn servers_that_do_not_get_ready_are_replaced_until_one_does() {
    let mut shell = Shell::new(
        "if [ $REPLACES = false ]; then echo ready >&0; echo up >> $NOTE; exit 1; fi; \
         echo x >> $NOTE; if [ $(grep -c x $NOTE) -lt 5 ]; then exec sleep 1000; fi; \
         echo ready >&0; echo steady >> $NOTE; read line",
    );
    shell.ready_limit = Duration::from_millis(100);
    run(&mut shell, "steady").unwrap();
    let log = shell.log.borrow();
    assert!(log.iter().filter(|line| line.ends_with("ready: killed")).count() >= 4, "{log:?}");
}

#[test]
fn a_server_that_does_not_end_is_killed_and_the_kill_reported() {
    // A killed server that gets no CPU is not gone in time.
    assert!((0..5).any(|_| is_killed_and_gone()), "each time it was not gone");
}

/// Whether a server that does not end was gone in time after its kill.
fn is_killed_and_gone() -> bool {
    let mut shell = Shell::new("echo ready >&0; echo up $$ >> $NOTE; exec sleep 1000");
    shell.down = Some("echo down >> $NOTE".into());
    shell.end_limit = Duration::from_millis(500);
    let error = run(&mut shell, "up").unwrap_err();
    let SuperviseError::Stuck { gone, .. } = error else { panic!("{error}") };
    let noted = shell.noted();
    assert!(noted.ends_with("down\n"), "{noted}");
    let log = shell.log.borrow();
    let [.., killed, abandoned] = &log[..] else { panic!("{log:?}") };
    // Until it sleeps it works.
    assert!(killed.starts_with("the server has not ended in ") && killed.ends_with(": killed"));
    assert_eq!(abandoned, "abandoned");
    let pid = noted.lines().find_map(|line| line.strip_prefix("up ")).unwrap();
    assert!(!gone || !PathBuf::from(format!("/proc/{pid}")).exists(), "{noted}");
    gone
}
