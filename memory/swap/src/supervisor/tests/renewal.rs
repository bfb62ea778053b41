//! Requests for another server in the place of one that serves.

use super::*;

/// Runs a server that notes `up`, requests a successor then, and stops all when `text` is noted.
fn renew(shell: &mut Shell, text: &'static str) -> (String, String) {
    let (requests, ask) = UnixStream::pair().unwrap();
    shell.requests = Some(requests);
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        while !fs::read_to_string(&note).unwrap_or_default().contains("up\n") {
            std::thread::sleep(Duration::from_millis(5));
        }
        (&ask).write_all(b"x").unwrap();
        ask
    });
    run(shell, text).unwrap();
    asking.join().unwrap();
    let log = shell.log.borrow().join("\n");
    (shell.noted(), log)
}

const PRESENT: &str =
    "if [ $REPLACES = true ]; then echo another >> $NOTE; fi; echo ready >&0; echo up >> $NOTE; \
     read line; echo present $line >> $NOTE";

/// The present server is killed, and the new one serves.
#[test]
fn a_successor_that_stands_by_takes_the_place_of_the_server() {
    let mut shell = Shell::new(PRESENT);
    shell.successor = "echo stands by >&0; read line; echo $line >> $NOTE; echo ready >&0; \
                       until [ -e ${NOTE%note}renewed ]; do sleep 0.01; done; \
                       echo serves >> $NOTE; read line; echo $line >> $NOTE"
        .into();
    let (noted, log) = renew(&mut shell, "serves");
    assert_eq!(noted, "up\ngo there\nserves\nend\n");
    assert!(log.contains("renewed Ok(())") && !log.contains("has died"), "{log}");
}

/// By the kernel's NBD client a server that is ready has no requests yet.
#[test]
fn a_request_for_another_server_ends_when_requests_reach_it() {
    for (word, outcome) in [
        ("connected", "renewed Ok(())"),
        ("unconnected", "renewed Err(\"the kernel's NBD client has taken no connection"),
    ] {
        let mut shell = Shell::new(PRESENT);
        shell.is_connected_later = true;
        // The line "device 9" shows that the supervisor has read "ready" before the word.
        shell.successor = format!(
            "echo stands by >&0; read line; echo ready >&0; echo device 9 >&0; \
             echo {word} >&0; until [ -e ${{NOTE%note}}renewed ]; do sleep 0.01; done; \
             echo serves >> $NOTE; read line"
        );
        let (_, log) = renew(&mut shell, "serves");
        let at = |text: &str| log.find(text).unwrap_or_else(|| panic!("no {text} in {log}"));
        assert!(at("up true") < at("said device 9") && at("said device 9") < at(outcome), "{log}");
        assert_eq!(log.matches("renewed").count(), 1, "{log}");
    }
    // It dies before: the request has failed, and another server starts.
    let mut shell = Shell::new(PRESENT);
    shell.is_connected_later = true;
    shell.successor = "echo stands by >&0; read line; echo ready >&0; exit 7".into();
    let (_, log) = renew(&mut shell, "another\nup\n");
    assert!(log.contains("renewed Err(\"the new server has died (exit status: 7)"), "{log}");
}

/// The present server continues, and does not notice the other one.
#[test]
fn a_successor_that_fails_before_its_takeover_changes_nothing() {
    let stands_by = "echo stands by >&0; read line; echo wrong $line >> $NOTE";
    let stopped =
        "exec 3>&0; pid=$$; (until grep -q '^State:.T' /proc/$pid/status; do sleep 0.01; done; \
                   echo stands by >&3) & kill -STOP $$; echo wrong >> $NOTE";
    let short = Duration::from_secs(1);
    for (successor, limit, no_hand_over, why) in [
        ("exit 3", LONG, None, "the new server ended with exit status: 3"),
        ("exec sleep 1000", short, None, "the new server did not get its memory in"),
        (stands_by, LONG, Some("no such program"), "no such program"),
        // It says so when it is stopped, and would take the order to go and not act on it.
        (stopped, LONG, None, "the new server cannot be told to go: it has been stopped"),
    ] {
        let mut shell = Shell::new(
            "echo ready >&0; echo up >> $NOTE; until [ -e ${NOTE%note}renewed ]; do sleep 0.01; \
             done; echo over >> $NOTE; read line; echo $line >> $NOTE",
        );
        shell.ready_limit = limit;
        (shell.successor, shell.no_hand_over) = (successor.into(), no_hand_over);
        let (noted, log) = renew(&mut shell, "over");
        assert_eq!(noted, "up\nover\nend\n", "{log}");
        assert!(log.contains(&format!("renewed Err(\"{why}")), "{log}");
    }
}

/// Regression: a server of an earlier version, which cannot connect the kernel's NBD client to a
/// disk with a name, took the place of one that can.
#[test]
fn a_service_hears_whether_a_successor_names_its_disk_and_may_refuse_it() {
    let present =
        "echo ready >&0; echo up >> $NOTE; until [ -e ${NOTE%note}renewed ]; do sleep 0.01; done; \
         echo over >> $NOTE; read line; echo $line >> $NOTE";
    let old = "echo stands by >&0; read line; echo wrong $line >> $NOTE";
    let mut shell = Shell::new(present);
    (shell.successor, shell.is_named) = (old.into(), true);
    let (noted, log) = renew(&mut shell, "over");
    assert_eq!(noted, "up\nover\nend\n", "{log}");
    assert!(log.contains("renewed Err(\"it names no disk\")"), "{log}");
    // The supervisor may read the two lines at once or one by one.
    let serves = "read line; echo ready >&0; until [ -e ${NOTE%note}renewed ]; do sleep 0.01; \
                  done; echo serves >> $NOTE; read line";
    for (is_named, lines) in [
        (true, "printf 'names its disk\\nstands by\\n' >&0"),
        (true, "echo names its disk >&0; sleep 0.1; echo stands by >&0"),
        (false, "echo stands by >&0"),
    ] {
        let mut shell = Shell::new(PRESENT);
        shell.is_named = is_named;
        shell.successor = format!("{lines}; {serves}");
        let (noted, log) = renew(&mut shell, "serves");
        assert_eq!(noted, "up\nserves\n", "{log}");
        assert!(log.contains("renewed Ok(())"), "{log}");
    }
}

/// Either server dies at that moment: another server starts, which knows of no request.
#[test]
fn a_server_that_dies_during_its_replacement_is_replaced() {
    // The present server dies while the successor allocates its memory.
    let mut shell = Shell::new(
        "echo ready >&0; echo up >> $NOTE; if [ $REPLACES = true ]; then echo another >> $NOTE; \
         read line; echo $line >> $NOTE; else until grep -q begun $NOTE; do sleep 0.01; done; \
         exit 5; fi",
    );
    shell.successor = "echo begun >> $NOTE; read line; echo wrong >> $NOTE".into();
    let (noted, log) = renew(&mut shell, "another");
    assert_eq!(noted, "up\nbegun\nup\nanother\nend\n", "{log}");
    assert!(log.contains("renewed Err(\"the present server has died"), "{log}");
    // The new server dies after "go".
    let mut shell = Shell::new(PRESENT);
    shell.successor = "echo stands by >&0; read line; echo $line >> $NOTE; exit 7".into();
    let (noted, log) = renew(&mut shell, "another\nup\n");
    assert_eq!(noted, "up\ngo there\nanother\nup\npresent end\n", "{log}");
    assert!(log.contains("renewed Err(\"the new server has died (exit status: 7)"), "{log}");
}
