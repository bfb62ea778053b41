//! Helpers that are not gone after their kill, as where they hang in a call of the kernel.

use super::*;
use crate::supervisor::process::tests::SPARES;

/// Notes itself, and ends with the test's folder.
const HANGS_ON: &str = "echo hangs $$ >> $NOTE; while [ -e $NOTE ]; do sleep 0.05; done";

/// The message about the helper that has noted itself.
fn reported(shell: &Shell) -> String {
    let noted = shell.noted();
    let pid = noted.lines().find_map(|line| line.strip_prefix("hangs ")).unwrap();
    format!("helper process {pid} is not gone 10s after its kill")
}

/// Regression: the supervisor waited without end for a killed helper, and the device did not end.
#[test]
fn a_helper_of_the_first_start_that_is_not_gone_after_its_kill_ends_the_device() {
    SPARES.set(true);
    let mut shell = Shell::new(SERVER);
    shell.up = Some(HANGS_ON.into());
    shell.down = Some("echo down >> $NOTE".into());
    shell.ready_limit = Duration::from_millis(500);
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Up(_)), "{error}");
    let noted = shell.noted();
    let order: Vec<_> = noted.lines().filter(|line| ["down", "end"].contains(line)).collect();
    assert_eq!(order, ["down", "end"], "{noted}");
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("has not ended in 500ms: killed"), "{log}");
    assert!(log.contains(&reported(&shell)), "{log}");
}

/// Regression: the supervisor waited without end for a killed helper, and took no further request.
#[test]
fn a_helper_of_the_end_that_is_not_gone_after_its_kill_delays_no_further_attempt() {
    SPARES.set(true);
    let mut shell = Shell::new(SERVER);
    shell.down = Some(format!("if grep -q hangs $NOTE; then exit 0; fi; {HANGS_ON}"));
    shell.down_limit = Duration::from_millis(500);
    let (stop, ask) = UnixStream::pair().unwrap();
    stop.set_nonblocking(true).unwrap();
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        let deadline = Instant::now() + LONG;
        let noted = |text| fs::read_to_string(&note).unwrap_or_default().contains(text);
        while !noted("end") {
            assert!(Instant::now() < deadline);
            if noted("up") {
                (&ask).write_all(b"x").unwrap();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        ask
    });
    supervise(&mut shell, stop.as_fd()).unwrap();
    asking.join().unwrap();
    assert!(shell.noted().ends_with("\nend\n"), "{}", shell.noted());
    let log = shell.log.borrow().join("\n");
    let (gone, goes_on) = (log.find(&reported(&shell)), log.find("(signal: 9 (SIGKILL)): serving"));
    assert!(gone.is_some() && gone < goes_on, "{log}");
}
