//! `platen device serve --codec qatzip`, on a simulated QAT device and without one. A debug build,
//! which ends at once when an I/O thread allocates.

#[path = "device_qat/hung.rs"]
mod hung;
#[path = "device_qat/rig.rs"]
mod rig;

use rig::{command, has_offloaded, pages, Served, HANG};
use rustix::process::{kill_process, Pid, Signal};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_device_compresses_written_pages_and_stat_counts_them() {
    for (options, script) in
        [(&[][..], "instances 1"), (&["--accelerator", "qat", "--qat-threads", "2"], "")]
    {
        let served = Served::new(Some(script), options);
        let plain = pages(700, 3);
        let mut client = served.client();
        let stat = served.write_until(&mut client, &plain, has_offloaded);
        assert!(client.read(plain.len()) == plain);
        let accelerator = &stat["accelerator"];
        let threads = if options.is_empty() { 1 } else { 2 };
        assert_eq!(accelerator["threads"], threads, "{stat:#}");
        let done = |name: &str| accelerator[name].as_u64().unwrap();
        let written = stat["platen"]["pages_written"].as_u64().unwrap();
        assert!(done("offloaded") + done("redone") <= written, "{stat:#}");
        assert_eq!(stat["codec"], "qatzip");
        assert!(served.text().contains("Pages that the QAT device compressed"));
        drop(client);
        assert!(served.end().contains("threads with an instance each"));
    }
}

#[test]
fn without_a_device_auto_serves_in_software_and_qat_refuses() {
    let served = Served::new(None, &[]);
    let plain = pages(100, 5);
    let mut client = served.client();
    client.write(&plain);
    assert!(client.read(plain.len()) == plain);
    let stat = served.numbers();
    assert!(stat["accelerator"].is_null(), "{stat:#}");
    assert!(stat["unaccelerated"].as_str().unwrap().contains("cannot load"), "{stat:#}");
    assert!(served.text().contains("accelerator: none, codec qatzip in software: cannot load"));
    drop(client);
    let log = served.end();
    assert!(log.contains("codec qatzip in software: cannot load"), "{log}");

    let folder = tempfile::tempdir().unwrap();
    let no_library = folder.path().display().to_string();
    for (options, word) in [
        (&["--accelerator", "qat", "--qat-libraries", &*no_library][..], "no QAT device"),
        (&["--accelerator", "qat", "--codec", "zstd"], "goes with --codec qatzip"),
        (&["--accelerator", "qatzip"], "invalid value"),
    ] {
        let mut command = command(folder.path(), &[]);
        if options.contains(&"--codec") {
            command = Command::new(env!("CARGO_BIN_EXE_platen"));
            command.args(["device", "serve", "--size", "1M", "--nbd", "unix:/nonexistent/x"]);
        }
        let output = command.args(options).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{options:?}: {said}");
    }
}

#[test]
fn a_killed_server_is_replaced_and_its_successor_uses_the_device() {
    let served = Served::new(Some("instances 1; at 300 fail 5"), &["--accelerator", "qat"]);
    let plain = pages(500, 7);
    let stat = served.write_until(&mut served.client(), &plain, has_offloaded);
    let pid = i32::try_from(stat["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let start = Instant::now();
    // It serves before it has the device, or soon after.
    let next = loop {
        let text = served.stat(true);
        let next = serde_json::from_str::<serde_json::Value>(&text).map(|all| all[0].clone());
        match next {
            Ok(next) if next["pid"] != stat["pid"] && next["accelerator"]["on_device"] == 1 => {
                break next
            }
            _ => assert!(start.elapsed() < HANG, "no other server: {}", served.log()),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(next["platen"]["lost_pages"], 0, "{next:#}");
    let mut client = served.client();
    assert!(client.read(plain.len()) == plain);
    let other = pages(500, 9);
    served.write_until(&mut client, &other, has_offloaded);
    assert!(client.read(other.len()) == other);
    drop(client);
    served.end();
}

#[test]
fn a_device_that_falls_silent_delays_neither_writes_nor_the_end() {
    let served = Served::new(Some("instances 1; at 100 silence"), &["--accelerator", "qat"]);
    let plain = pages(500, 11);
    let mut client = served.client();
    // It has got its hundredth page, and is not trusted any more.
    served.write_until(&mut client, &plain, |stat| {
        let accelerator = &stat["accelerator"];
        let done = |name: &str| accelerator[name].as_u64().unwrap_or(0);
        let late = accelerator["reasons"]["late"].as_u64();
        done("offloaded") + done("redone") >= 100 && accelerator["on_device"] == 0 && late > Some(0)
    });
    assert!(client.read(plain.len()) == plain);
    drop(client);
    let start = Instant::now();
    served.end();
    assert!(start.elapsed() < HANG, "it took {:?} to end", start.elapsed());
}
