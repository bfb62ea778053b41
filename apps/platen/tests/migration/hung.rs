//! A codec thread in a call of the QAT device's library that never returns.

use super::*;

/// More than the codec thread takes for the few chunks of this test, many times over.
const SPUN: Duration = Duration::from_secs(2);

/// CPU time of the thread of `process` with this name.
fn cpu_time(process: u32, name: &str) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let times = tasks.flatten().filter_map(|task| {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).ok();
        (read("comm")?.trim_end() == name).then_some(())?;
        read("schedstat")?.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

/// Nothing else ends such a migration: its chunk never comes back from the codec thread.
#[test]
fn interrupts_end_a_migration_whose_codec_thread_never_returns() {
    let libraries = path(&qat_sim::libraries());
    let rig = Rig::new("");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let (listen, json) = (unix(&rig.at("src")), path(&rig.at("relay.json")));
    let mut relay = Platen::start(
        "PLATEN_QAT_SIM='instances 1; at 1 spin submit'; export PLATEN_QAT_SIM;",
        &["relay", "--insecure", "--peer", &rig.address, "--listen", &listen]
            .into_iter()
            .chain(["--json", &json, "--codec", "qatzip", "--accelerator", "qat"])
            .chain(["--qat-libraries", &libraries, "--compress-threads", "1"])
            .collect::<Vec<_>>(),
    );
    relay.says("listening on");
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    let text: Vec<u8> = b"what QEMU sends. ".iter().copied().cycle().take(256 << 10).collect();
    source.write_all(&[&STREAM[..8], &text].concat()).unwrap();
    let start = Instant::now();
    while cpu_time(relay.child.id(), "compress0") < SPUN {
        assert!(start.elapsed() < WATCHDOG, "no thread spins");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Without a return path the relay knows nothing of the destination, and asks once more.
    kill_process(Pid::from_child(&relay.child), Signal::INT).unwrap();
    relay.says("interrupt again to end this relay");
    kill_process(Pid::from_child(&relay.child), Signal::INT).unwrap();
    let (status, said) = relay.ends();
    assert_eq!(status, Some(1), "{said}");
    // The receiver connects when the first chunk has come.
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "the chunk has come");
    let (status, said) = rig.receive.ends();
    assert_eq!(status, Some(1), "{said}");
}
