//! How the real QATzip handles the device's faults. The outcomes were observed with QATzip 1.3.1,
//! and are why platen drives the device itself.

use conformance::{intel, Intel, Run};
use flate2::read::MultiGzDecoder;
use qat_sim::Counters;
use std::fs;
use std::io::Read;
use std::mem::offset_of;
use std::path::Path;

/// Runs the client in `folder`; returns its lines without the time.
fn client(intel: &Intel, folder: &Path, script: &str, steps: &[&str]) -> (Vec<String>, Run) {
    let run = intel.run(&intel.client(), steps, folder, script);
    assert!(run.output.status.success(), "{steps:?}: {:?} {}", run.output.status, run.text());
    let text = String::from_utf8_lossy(&run.output.stdout).into_owned();
    let lines = text.lines().filter_map(|line| line.strip_prefix("> "));
    let lines = lines.map(|line| line.split(" ms=").next().unwrap_or_default().to_owned());
    (lines.collect(), run)
}

/// Checks that the output in FILE is gzip members with the contents of FILE.plain.
fn is_right(folder: &Path, name: &str) -> bool {
    let packed = fs::read(folder.join(name)).expect("the client has written it");
    let mut plain = Vec::new();
    let read = MultiGzDecoder::new(&packed[..]).read_to_end(&mut plain);
    let expected = fs::read(folder.join(format!("{name}.plain"))).expect("likewise");
    read.is_ok() && plain == expected
}

const OK: &str = "compress 0 consumed=1";

#[test]
fn hardware_is_used_where_software_is_forbidden() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let steps = ["init:0", "init:0", "session:0", "compress:1048576:a", "decompress:a"];
    let (lines, run) = client(&intel, folder.path(), "", &steps);
    assert_eq!(lines, ["init 0", "init 1", "session 0 hw=0", OK, "decompress 0 equal=1"]);
    assert_eq!((run.count("compress"), run.count("decompress")), (16, 16));
    assert!(is_right(folder.path(), "a"));

    let (lines, run) = client(&intel, folder.path(), "absent", &["init:0"]);
    assert_eq!(lines, ["init -101"], "QZ_NOSW_NO_HW");
    assert_eq!(run.count("submissions"), 0);
}

#[test]
fn older_devices_with_intermediate_buffers_work_too() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let steps = ["init:0", "session:0", "compress:200000:a", "decompress:a"];
    let (lines, run) = client(&intel, folder.path(), "intermediate 12", &steps);
    assert_eq!(lines[2..], [OK, "decompress 0 equal=1"]);
    assert_eq!(run.count("compress"), 4);
}

#[test]
fn a_refused_submission_becomes_software_or_a_failure() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    for (software, expected) in [("1", OK), ("0", "compress -2 consumed=0")] {
        let (init, session) = (format!("init:{software}"), format!("session:{software}"));
        let steps = [&init, &session, "compress:1048576:a"];
        let (lines, run) = client(&intel, folder.path(), "at 5 fail", &steps);
        assert_eq!(lines[2].split(' ').nth(1), expected.split(' ').nth(1), "{lines:?}");
        assert_eq!(run.count("faults"), 1);
        assert_eq!(is_right(folder.path(), "a"), software == "1");
    }
}

#[test]
fn an_error_result_becomes_software_or_a_failure() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    for (software, code) in [("1", "0"), ("0", "-2")] {
        let (init, session) = (format!("init:{software}"), format!("session:{software}"));
        let steps = [&init, &session, "compress:1048576:a"];
        let (lines, run) = client(&intel, folder.path(), "at 3 error -13 2", &steps);
        assert_eq!(lines[2].split(' ').nth(1), Some(code), "{lines:?}");
        assert_eq!(run.count("faults"), 2);
        assert_eq!(is_right(folder.path(), "a"), software == "1");
    }
}

#[test]
fn a_full_ring_is_awaited() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let steps = ["init:0", "session:0", "compress:1048576:a"];
    let (lines, run) = client(&intel, folder.path(), "at 4 retry 20", &steps);
    assert_eq!(lines[2], OK);
    assert_eq!((run.count("retries"), run.count("compress")), (20, 16));
    assert!(is_right(folder.path(), "a"));
}

#[test]
fn a_dead_device_loses_no_data_and_a_reset_restores_it() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    // The device answers nothing, and is reset at the sixth request. QATzip's own thread polls for
    // events every millisecond: if it is the faster one, the device refuses the sixth request.
    let script = "now silence; at 6 reset 20";
    // FATAL_ERROR, RESTARTING, RESTARTED, for each of the four instances.
    let events = 12;
    let restarted = format!("counter:{}:{events}", offset_of!(Counters, events) / 8);
    let steps = ["init:1", "session:1", "compress:1048576:a", &restarted, "compress:1048576:b"];
    let (lines, run) = client(&intel, folder.path(), script, &steps);
    assert_eq!(lines[2..], [OK, OK]);
    assert!(is_right(folder.path(), "a") && is_right(folder.path(), "b"));
    let dead = run.count("dummies");
    assert!(dead >= 5, "{}", run.report);
    assert_eq!(run.count("events"), events, "{}", run.report);
    let answered = run.count("compress") - dead;
    assert!(answered >= 16, "the second call is the device's: {}", run.report);
    assert_eq!(run.count("plain_bytes"), answered * 65_536, "{}", run.report);
}

#[test]
fn qatzip_does_not_detect_a_flipped_bit() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let steps = ["init:0", "session:0", "compress:1048576:a"];
    let (lines, _) = client(&intel, folder.path(), "at 8 flip", &steps);
    assert_eq!(lines[2], OK, "no check of its own");
    assert!(!is_right(folder.path(), "a"));
}

#[test]
fn a_failed_poll_is_an_error_even_with_software() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let steps = ["init:1", "session:1", "compress:1048576:a"];
    let (lines, run) = client(&intel, folder.path(), "now pollfail", &steps);
    assert_eq!(lines[2].split(' ').nth(1), Some("-2"), "{lines:?}");
    assert_eq!(run.count("faults"), 1);
}

#[test]
fn memory_that_the_device_cannot_reach_is_refused() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    // Told that any address will do, QATzip passes its caller's memory, from malloc, to the device.
    for (software, code) in [("1", "0"), ("0", "-2")] {
        let (init, session) = (format!("init:{software}"), format!("session:{software}"));
        let steps = [&init, &session, "compress:1048576:a"];
        let (lines, run) = client(&intel, folder.path(), "contiguous 0", &steps);
        assert_eq!(lines[2].split(' ').nth(1), Some(code), "{lines:?}");
        assert!(run.count("submissions") > 0);
        assert_eq!((run.count("accepted"), run.count("violations")), (0, 0));
        assert_eq!(is_right(folder.path(), "a"), software == "1");
    }
}

#[test]
fn a_bad_script_is_no_device() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (lines, run) = client(&intel, folder.path(), "engine zstd", &["init:0"]);
    assert_eq!(lines, ["init -101"]);
    assert!(run.text().contains("line 1: `engine zstd`"), "{}", run.text());
}
