//! Deaths of servers, and OOM kills in their cgroup.

use super::*;

/// Sets the count of OOM kills, by a script.
fn killed(count: u32) -> String {
    format!("echo oom_kill {count} > ${{NOTE%note}}memory.events; ")
}

/// Runs a service of this script, whose cgroup is its folder; returns the messages of deaths.
fn deaths(script: &str, set_up: impl FnOnce(&mut Shell)) -> Vec<String> {
    let mut shell = Shell::new(script);
    shell.kills = Some(OomKills::new(shell.folder.path(), "0::/\n"));
    set_up(&mut shell);
    run(&mut shell, "last").unwrap();
    let log = shell.log.borrow();
    let deaths = log.iter().filter(|line| line.contains("the server has died"));
    deaths.cloned().collect()
}

/// Regression: any death was blamed on a kill in the cgroup, whatever had ended the server.
#[test]
fn a_kill_is_the_cause_of_a_death_by_sigkill_only() {
    let script = format!(
        "echo ready >&0; echo x >> $NOTE; case $(wc -l < $NOTE) in \
           1) {}exit 3;; 2) {}kill -9 $$;; 3) kill -9 $$;; 4) {}kill -TERM $$;; 5) kill -9 $$;; esac; \
         echo last >> $NOTE; read line",
        killed(1),
        killed(2),
        killed(3),
    );
    let deaths = deaths(&script, |_| ());
    let blamed: Vec<_> = deaths.iter().map(|line| line.contains("for want of memory")).collect();
    assert_eq!(blamed, [false, true, false, false, false], "{deaths:?}");
}

/// Regression: a server that the supervisor killed because it was late was said to be killed for
/// want of memory, if the kernel had killed another process of the cgroup meanwhile.
#[test]
fn a_server_that_the_supervisor_kills_has_not_died_of_a_kill_in_the_cgroup() {
    let script = format!(
        "echo x >> $NOTE; case $(wc -l < $NOTE) in \
           1) echo ready >&0; exit 3;; 2) {}exec sleep 1000;; esac; \
         echo ready >&0; echo last >> $NOTE; read line",
        killed(1),
    );
    // A late server may be killed before it has written the count: another one follows then.
    let deaths = deaths(&script, |shell| shell.ready_limit = Duration::from_secs(2));
    assert!(deaths.len() >= 2 && deaths[1].contains("signal: 9"), "{deaths:?}");
    assert!(!deaths.iter().any(|line| line.contains("for want of memory")), "{deaths:?}");
}

/// Regression: the OOM killer chooses a trainer first, and the next death of a server, whenever and
/// however, was blamed on that kill.
#[test]
fn a_kill_of_a_trainer_is_not_the_cause_of_a_later_death() {
    let script = "touch $NOTE; echo ready >&0; \
         if [ $REPLACES = true ]; then echo last >> $NOTE; read line; exit 0; fi; \
         $ASK > /dev/null 2>&1; until [ -e $NOTE.reaped ]; do sleep 0.01; done; kill -9 $$";
    let trainer = format!("{}kill -9 $$", killed(1));
    let deaths = deaths(script, |shell| shell.train = Some((trainer, LONG)));
    assert_eq!(deaths.len(), 1, "{deaths:?}");
    assert!(!deaths[0].contains("for want of memory"), "{deaths:?}");
}
