//! The faults of the simulated device, and by what each is seen to have been met. Also run by the
//! tests of `offload`.

use qat::{Reason, Snapshot};
use std::time::Duration;

/// No piece may have waited longer, by the engines' own count. Several times the deadline, because
/// a thread of a busy machine can be put aside for long; far from the seconds or for ever that the
/// faults would cost a naive driver.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(20);

pub(crate) struct Fault {
    pub(crate) name: &'static str,
    pub(crate) script: &'static str,
    /// The condition on the sum of all engines' counters: the fault happened, and was handled as
    /// intended.
    pub(crate) met: fn(&Snapshot) -> bool,
}

impl Fault {
    /// Short where the deadline is what ends the wait, else longer than `LONGEST_WAIT`: then a busy
    /// machine's device does not miss it, and a driver that waits for it is found out.
    pub(crate) fn deadline(&self) -> Duration {
        let waits = ["silence", "late"].iter().any(|word| self.script.contains(word));
        if waits {
            Duration::from_millis(60)
        } else {
            Duration::from_secs(60)
        }
    }

    /// Runs a case, which returns whether the fault was met as meant, and how long the slowest
    /// piece has waited. Tries again where a busy machine can have put a thread aside: for
    /// `LONGEST_WAIT`, or for longer than a device that answers after 600 ms.
    pub(crate) fn until_met(&self, mut case: impl FnMut() -> (bool, Duration)) {
        let mut last = Duration::ZERO;
        for _ in 0..5 {
            let (met, waited) = case();
            last = waited;
            if met && waited < LONGEST_WAIT {
                return;
            }
            let may_be_missed = self.script.contains("600");
            assert!(met || may_be_missed, "{}: not met as meant", self.name);
        }
        panic!("{}: not met as meant, or slowly: a piece waited {last:?}", self.name);
    }
}

/// A piece whose output was verified and found wrong raises a suspicion, which redoes all that is
/// in flight: where that is this one alone, it counts as suspect.
fn found_wrong(sum: &Snapshot) -> bool {
    sum.software_for(Reason::Wrong) + sum.software_for(Reason::Suspect) > 0
}

pub(crate) const FAULTS: [Fault; 24] = [
    Fault { name: "none", script: "", met: |sum| sum.by_device > 0 },
    Fault { name: "full for a while", script: "at 3 retry 40", met: |sum| sum.retries >= 1 },
    Fault { name: "full for ever", script: "at 3 retry forever", met: |sum| sum.software() > 0 },
    Fault {
        name: "some refused",
        script: "at 3 fail 3",
        met: |sum| sum.software_for(Reason::Refused) > 0,
    },
    Fault { name: "all refused", script: "every 1 fail 1", met: |sum| sum.by_device == 0 },
    Fault {
        name: "overflow",
        script: "at 3 status -11 3",
        met: |sum| sum.software_for(Reason::Failed) > 0,
    },
    Fault {
        name: "verify error",
        script: "at 3 status -18 2",
        met: |sum| sum.software_for(Reason::Failed) > 0,
    },
    Fault {
        name: "error answers",
        script: "at 2 error -17 5",
        met: |sum| sum.software_for(Reason::Failed) > 0,
    },
    Fault {
        name: "only error answers",
        script: "every 1 error -13 1",
        met: |sum| sum.by_device == 0,
    },
    Fault { name: "one poll fails", script: "at 2 pollfail 1", met: |sum| sum.poll_failures == 1 },
    Fault {
        name: "polls fail",
        script: "at 2 pollfail 100000000",
        met: |sum| sum.software_for(Reason::Poll) > 0,
    },
    Fault {
        name: "silence",
        script: "at 5 silence",
        met: |sum| sum.software_for(Reason::Late) > 0,
    },
    Fault {
        name: "silence from the start",
        script: "now silence",
        met: |sum| sum.by_device == 0 && sum.deadlines > 0,
    },
    Fault {
        name: "silence and back",
        script: "at 5 silence; after 600 revive",
        met: |sum| sum.software() > 0,
    },
    Fault { name: "some late", script: "at 3 late 600 4", met: |sum| sum.software() > 0 },
    Fault { name: "a wrong bit", script: "at 3 flip 3", met: found_wrong },
    Fault { name: "every output wrong", script: "every 1 flip 1", met: found_wrong },
    Fault {
        name: "a wrong checksum",
        script: "at 3 crc 3",
        met: |sum| sum.software_for(Reason::Wrong) > 0,
    },
    Fault {
        name: "more output than room",
        script: "at 3 produced 4294967295 3",
        met: |sum| sum.software_for(Reason::Wrong) > 0,
    },
    Fault { name: "death", script: "at 6 fatal", met: |sum| sum.software() > 0 },
    Fault { name: "death at once", script: "at 1 fatal", met: |sum| sum.software() > 0 },
    Fault { name: "restarting", script: "at 6 restarting", met: |sum| sum.software() > 0 },
    Fault { name: "reset", script: "at 6 reset 20", met: |sum| sum.software() > 0 },
    Fault {
        name: "restarting and back",
        script: "at 6 restarting; after 30 restarted",
        // By whom is a matter of who is faster; that the device is used again, `life` has.
        met: |sum| sum.by_device + sum.software() > 0,
    },
];

/// The counters the faults are judged by, added up.
pub(crate) fn sum(snapshots: &[Snapshot]) -> Snapshot {
    let add = |of: fn(&Snapshot) -> u64| snapshots.iter().map(of).sum();
    let by_software = Reason::ALL
        .into_iter()
        .map(|reason| (reason, snapshots.iter().map(|one| one.software_for(reason)).sum()))
        .collect();
    Snapshot {
        longest_wait_us: snapshots.iter().map(|one| one.longest_wait_us).max().unwrap_or(0),
        by_device: add(|one| one.by_device),
        retries: add(|one| one.retries),
        poll_failures: add(|one| one.poll_failures),
        deadlines: add(|one| one.deadlines),
        by_software,
        ..Snapshot::default()
    }
}
