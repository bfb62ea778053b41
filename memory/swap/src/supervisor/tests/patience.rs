//! Servers that take longer to end than their limit.

use super::*;

/// Runs a server that does not end before the supervisor has given it more time.
fn ends(script: &str) {
    let mut shell = Shell::new(script);
    let pulse = Pulse::file().unwrap();
    shell.pulse = Some((Pulse::open(&pulse).unwrap(), pulse));
    // It has ten times that to see that it has more.
    shell.end_limit = Duration::from_secs(3);
    run(&mut shell, "ready").unwrap();
    let log = shell.log.borrow();
    let line = "the server has not ended in 3s, but works on it: 3s more";
    assert!(log.iter().any(|said| said == line), "{log:?}");
    assert!(!log.iter().any(|said| said.contains("killed")), "{log:?}");
}

/// Regression: on a host short of CPU a server that was still at its end was killed after 30 s, and
/// `serve` failed.
#[test]
fn a_server_that_uses_cpu_for_its_end_is_not_killed_at_its_limit() {
    ends(
        "echo ready >&0; echo ready >> $NOTE; read line; until [ -e $NOTE.works ]; do :; done; exit 0",
    );
}

#[test]
fn a_server_whose_heartbeat_advances_is_not_killed_at_its_limit() {
    ends(&format!("export {HANGS}=advances; exec $HANG"));
}

#[test]
fn a_server_that_spins_instead_of_its_end_is_killed_after_ten_limits() {
    let mut shell = Shell::new("echo ready >&0; echo up >> $NOTE; while :; do :; done");
    shell.end_limit = Duration::from_millis(100);
    let error = run(&mut shell, "up").unwrap_err();
    assert!(
        matches!(error, SuperviseError::Stuck { limit, .. } if limit.as_secs() == 1),
        "{error}"
    );
    let log = shell.log.borrow();
    assert_eq!(log.iter().filter(|line| line.contains("but works on it")).count(), 9, "{log:?}");
    assert!(log.iter().any(|line| line == "the server has not ended in 1s: killed"), "{log:?}");
}
