//! Calls of the QAT device's library that never return: the server is replaced by one that does
//! without the device.

use super::rig::{command, has_offloaded, pages, Served, HANG, PAGE};
use rustix::process::{kill_process, Pid, Signal};
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// The watchdog's reasons to kill a server with a thread in such a call.
const SLEEPS: &str = "sleeps in a request, and nothing wakes it";
const SPINS: &str = "over one page";
/// On a machine without a free CPU.
const SLOW: &str = "has done no page in 60 s";

fn pid(stat: &Value) -> Pid {
    Pid::from_raw(i32::try_from(stat["pid"].as_i64().unwrap()).unwrap()).unwrap()
}

impl Served {
    /// The status of the first server, other than `last`, of which `is` holds.
    fn after(&self, last: &Value, is: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let all = serde_json::from_str::<Value>(&self.stat(true)).unwrap_or_default();
            if all[0].is_object() && all[0]["pid"] != last["pid"] && is(&all[0]) {
                return all[0].clone();
            }
            assert!(start.elapsed() < HANG, "no other server: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Writes as a client does that connects again and repeats its requests.
    fn write_on(&self, first: usize, pages: &[u8]) {
        let start = Instant::now();
        while self.client().try_write(first, pages).is_err() {
            assert!(start.elapsed() < HANG, "a client does not get on: {}", self.log());
        }
    }

    /// `platen device WHAT qat`.
    fn order(&self, what: &str, options: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
        command.args(["device", what, "qat", "--run-dir"]).arg(self.path("run")).args(options);
        let start = Instant::now();
        loop {
            let output = command.output().unwrap();
            if output.status.success() {
                return;
            }
            // A server answers `stat` before its supervisor knows that it serves.
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let early = said.contains("it has no server that serves at the moment; try again");
            assert!(early && start.elapsed() < HANG, "{what}: {said}: {}", self.log());
        }
    }
}

/// The server is replaced once, no page is lost, and all clients go on. Otherwise each server
/// would hang in the same call.
fn is_replaced_by_one_in_software(script: &str, why: &str) -> (Served, Value) {
    let served = Served::new(Some(script), &["--accelerator", "qat"]);
    let (before, after) = (pages(250, 3), pages(700, 5));
    let mut client = served.client();
    // A few at a time: the call that hangs is not far.
    let first = served.write_until(&mut client, &before[..60 * PAGE], has_offloaded);
    client.write(&before);
    assert!(first["unaccelerated"].is_null(), "{first:#}");
    // Another client of the server that hangs, without requests.
    let mut idle = served.client();
    let start = Instant::now();
    while served.numbers()["pid"] == first["pid"] {
        served.write_on(250, &after);
        assert!(start.elapsed() < HANG, "no call hangs: {}", served.log());
    }
    assert!(idle.try_write(0, &before[..PAGE]).is_err(), "its server has been killed");

    let next = served.after(&first, |_| true);
    assert!(served.client().read((250 + 700) * PAGE) == [before, after].concat());
    assert_eq!(next["platen"]["lost_pages"], 0, "{next:#}");
    assert!(next["accelerator"].is_null(), "{next:#}");
    let told = "a server before this one hung in the driver of the QAT device";
    assert_eq!(next["unaccelerated"], told);
    assert!(served.text().contains(told));
    let log = served.log();
    assert_eq!(log.matches("the server hangs: ").count(), 1, "{log}");
    assert!(log.contains(why) || log.contains(SLOW), "{log}");
    for line in
        ["the next servers compress in software", &format!("codec qatzip in software: {told}")]
    {
        assert!(log.contains(line), "{line}: {log}");
    }
    (served, next)
}

#[test]
fn a_submission_that_never_returns_costs_one_server_and_the_next_one_works_in_software() {
    let script = "instances 1; at 600 block submit";
    let (served, second) = is_replaced_by_one_in_software(script, SLEEPS);
    // The fact outlives the death of a server, and changed settings.
    kill_process(pid(&second), Signal::KILL).unwrap();
    let third = served.after(&second, |_| true);
    assert!(third["unaccelerated"].is_string() && third["accelerator"].is_null(), "{third:#}");
    served.order("set", &["--mem-limit", "48M"]);
    let fourth = served.after(&third, |_| true);
    assert!(fourth["unaccelerated"].is_string() && fourth["accelerator"].is_null(), "{fourth:#}");
    // Another program uses the device again.
    served.order("upgrade", &[]);
    let fifth = served.after(&fourth, |stat| stat["accelerator"]["on_device"] == 1);
    assert!(fifth["unaccelerated"].is_null(), "{fifth:#}");
    served.end();
}

#[test]
fn a_poll_that_never_returns_costs_one_server_and_the_next_one_works_in_software() {
    let (served, _) = is_replaced_by_one_in_software("instances 1; at 600 block poll", SLEEPS);
    served.end();
}

/// A livelock of the real server.
#[test]
fn a_submission_that_spins_costs_one_server_and_the_next_one_works_in_software() {
    let (served, _) = is_replaced_by_one_in_software("instances 1; at 600 spin submit", SPINS);
    served.end();
}

/// A server that replaces another one serves before it has the device.
#[test]
fn a_start_that_never_returns_leaves_a_server_that_works_in_software() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    fs::write(&script, "instances 1").unwrap();
    let served = Served::new(Some(script.to_str().unwrap()), &["--accelerator", "qat"]);
    let plain = pages(300, 7);
    served.client().write(&plain);
    let first = served.numbers();
    fs::write(&script, "instances 1; now block start").unwrap();
    kill_process(pid(&first), Signal::KILL).unwrap();
    let next = served.after(&first, |_| true);
    assert!(next["unaccelerated"].is_string(), "{next:#}");
    let more = pages(300, 9);
    served.write_on(300, &more);
    assert!(served.client().read(600 * PAGE) == [plain, more].concat());
    let last = served.after(&first, |stat| {
        let why = stat["unaccelerated"].as_str().unwrap_or_default();
        why.contains("cpaDcStartInstance") && why.contains("has not returned for")
    });
    assert_eq!(last["pid"], next["pid"], "{}", served.log());
    assert!(last["accelerator"].is_null(), "{last:#}");
    // The next server has a device.
    fs::write(&script, "instances 1").unwrap();
    kill_process(pid(&last), Signal::KILL).unwrap();
    served.after(&last, |stat| stat["accelerator"]["on_device"] == 1);
    served.end();
}

/// A server that ends leaves the device to the kernel.
#[test]
fn a_stop_that_would_never_return_does_not_delay_the_end() {
    let script = "instances 1; now block stop forever";
    let served = Served::new(Some(script), &["--accelerator", "qat"]);
    served.client().write(&pages(100, 11));
    served.end();
}

/// The first server starts the library before it serves.
#[test]
fn a_first_server_whose_library_never_starts_works_in_software() {
    let served = Served::new(Some("instances 1; now block process"), &["--accelerator", "auto"]);
    let plain = pages(100, 13);
    served.client().write(&plain);
    assert!(served.client().read(100 * PAGE) == plain);
    let stat = served.numbers();
    let why = stat["unaccelerated"].as_str().unwrap_or_default();
    assert!(why.contains("icp_sal_userStartMultiProcess"), "{stat:#}");
    // Its thread in the library delays no end.
    served.end();
}

#[test]
fn a_first_server_that_needs_a_device_ends_when_the_library_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let output = command(folder.path(), &["--accelerator", "qat"])
        .arg("--qat-libraries")
        .arg(qat_sim::libraries())
        .env("PLATEN_QAT_SIM", "instances 1; now spin start")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cpaDcStartInstance") && said.contains("has not returned for"), "{said}");
}
