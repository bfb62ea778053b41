//! Trainers, which the supervisor starts for a server.

use super::*;

/// Records its process id, and whether an earlier trainer still runs.
const TRAINER: &str = "for other in $(sed -n 's/began //p' $NOTE); do \
     kill -0 $other 2> /dev/null && echo together >> $NOTE; done; echo began $$ >> $NOTE; exec sleep 1000";

/// Asks for a trainer, by a script, and waits for the beginning of the `nth`.
fn asked(nth: u32) -> String {
    format!("$ASK > /dev/null 2>&1; until [ \"$(grep -c began $NOTE)\" = {nth} ]; do sleep 0.01; done; ")
}

/// Asks for trainers, by a script, until one has begun. One that gets no CPU within its time limit
/// is killed before.
const ASKED_UNTIL_BEGUN: &str = "until grep -q began $NOTE; do $ASK > /dev/null 2>&1; n=0; \
     until grep -q began $NOTE || [ $n = 500 ]; do sleep 0.01; n=$((n + 1)); done; done; ";

/// Waits, by a script, until the first trainer has ended.
const ENDED: &str =
    "while kill -0 $(sed -n 's/began //p' $NOTE | head -1) 2> /dev/null; do sleep 0.01; done; ";

#[test]
fn a_trainer_that_hangs_is_killed_and_at_most_one_trainer_runs() {
    let begun = Instant::now();
    let long = Duration::from_secs(500);
    // Replaced by the next, and gone with the server. Without a descriptor there is none.
    let mut shell = Shell::new(&format!(
        "touch $NOTE; printf 'ready\\ntrain\\n' >&0; {}{}echo both >> $NOTE; read line; echo $line >> $NOTE",
        asked(1),
        asked(2)
    ));
    shell.train = Some((TRAINER.into(), long));
    run(&mut shell, "both").unwrap();
    let noted = shell.noted();
    assert_eq!(noted.matches("began").count(), 2, "{noted}");
    assert!(noted.ends_with("both\nend\n") && !noted.contains("together"), "{noted}");
    // Killed at its time limit; or when the server no longer needs it.
    for (limit, enough) in [(Duration::from_secs(2), ""), (long, "echo enough >&0; ")] {
        let mut shell = Shell::new(&format!(
            "touch $NOTE; echo ready >&0; {ASKED_UNTIL_BEGUN}{enough}{ENDED}echo killed >> $NOTE; \
             read line; echo $line >> $NOTE"
        ));
        shell.train = Some((TRAINER.into(), limit));
        run(&mut shell, "killed").unwrap();
        assert!(shell.noted().ends_with("killed\nend\n"), "{}", shell.noted());
        let log = shell.log.borrow();
        assert!(!log.iter().any(|line| line.contains("trainer")), "it is as was wished: {log:?}");
    }
    assert!(begun.elapsed() < long);
}

#[test]
fn a_trainer_ends_with_the_server_that_asked_for_it() {
    let mut shell = Shell::new(&format!(
        "touch $NOTE; echo ready >&0; if [ $REPLACES = false ]; then {}kill -9 $$; fi; \
         {ENDED}echo killed >> $NOTE; {}echo again >> $NOTE; read line; echo $line >> $NOTE",
        asked(1),
        asked(2)
    ));
    shell.train = Some((TRAINER.into(), Duration::from_secs(500)));
    run(&mut shell, "again").unwrap();
    let noted = shell.noted();
    assert!(noted.ends_with("again\nend\n") && !noted.contains("together"), "{noted}");
}

#[test]
fn a_trainer_that_fails_is_reported_and_does_not_end_the_device() {
    let mut shell = Shell::new(&format!(
        "touch $NOTE; echo ready >&0; {}{ENDED}echo on >> $NOTE; read line; echo $line >> $NOTE",
        asked(1)
    ));
    shell.train = Some(("echo began $$ >> $NOTE; exit 7".into(), Duration::from_secs(500)));
    // The supervisor has waited for the trainer by then: before, its process is there.
    run(&mut shell, "on\n").unwrap();
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("a trainer has ended with exit status: 7"), "{log}");
    assert!(shell.noted().ends_with("end\n"), "{}", shell.noted());
}
