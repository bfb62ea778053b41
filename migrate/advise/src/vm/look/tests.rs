//! Monitors that tell the truth, and monitors that do not.

use super::*;
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A monitor that answers each command by `answer`.
fn monitor(answer: impl Fn(&str) -> Value + Send + 'static) -> Qmp {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        let mut writer = theirs.try_clone().unwrap();
        let greeting = json!({"QMP": {"version": {"qemu": {"major": 9, "minor": 1, "micro": 0}}}});
        let _ = writeln!(writer, "{greeting}");
        for line in BufReader::new(theirs).lines() {
            let Ok(line) = line else { return };
            let asked: Value = serde_json::from_str(&line).unwrap();
            let command = asked["execute"].as_str().unwrap_or_default();
            let result = if command == "qmp_capabilities" { json!({}) } else { answer(command) };
            let _ = writeln!(writer, "{}", json!({"return": result, "id": asked["id"]}));
        }
    });
    Qmp::over(ours, Duration::from_secs(300)).unwrap()
}

fn truth(command: &str) -> Value {
    match command {
        "query-status" => json!({"status": "running", "running": true}),
        "query-memory-size-summary" => json!({"base-memory": 1 << 30, "plugged-memory": 1 << 20}),
        "query-cpus-fast" => json!([{}, {}]),
        "query-migrate-parameters" => json!({"downtime-limit": 300, "max-bandwidth": 0}),
        "query-migrate-capabilities" => {
            json!([{"capability": "events", "state": true}, {"capability": "xbzrle", "state": false}])
        }
        "query-kvm" => json!({"enabled": true, "present": true}),
        "query-qmp-schema" => json!([
            {"meta-type": "enum", "name": "1", "values": ["zlib", "zstd"]},
            {"meta-type": "enum", "name": "2", "values": ["none", "zlib", "zstd", "qatzip"]},
        ]),
        _ => json!({}),
    }
}

#[test]
fn a_monitor_is_asked_for_what_matters() {
    let vm = Vm::look(&mut monitor(truth)).unwrap();
    assert_eq!((vm.version, vm.ram, vm.cpus), ((9, 1), (1 << 30) + (1 << 20), 2));
    assert_eq!((vm.kvm, vm.capabilities.as_slice()), (true, &["events".to_owned()][..]));
    assert_eq!((vm.downtime_limit, vm.max_bandwidth, vm.channels), (300, None, 2));
    assert_eq!(vm.compressors, ["none", "zlib", "zstd", "qatzip"]);
}

#[test]
fn impossible_answers_are_named() {
    for (command, answer, word) in [
        ("query-memory-size-summary", json!({"base-memory": 0}), "base-memory"),
        (
            "query-memory-size-summary",
            json!({"base-memory": u64::MAX, "plugged-memory": 1}),
            "plugged",
        ),
        ("query-memory-size-summary", json!({"base-memory": -5}), "-5"),
        ("query-memory-size-summary", json!("much"), "much"),
        ("query-cpus-fast", json!([]), "0 vCPUs"),
        ("query-cpus-fast", json!({"cpus": 4}), "0 vCPUs"),
    ] {
        let told = answer.clone();
        let lie = move |asked: &str| if asked == command { told.clone() } else { truth(asked) };
        let error = Vm::look(&mut monitor(lie)).unwrap_err().to_string();
        assert!(error.contains(command) && error.contains(word), "{answer}: {error}");
    }
}

/// Parameters and lists that are nonsense have usual values, or none.
#[test]
fn other_nonsense_is_left_out() {
    let odd = |asked: &str| match asked {
        "query-migrate-parameters" => json!({"multifd-channels": -3, "max-bandwidth": "x"}),
        "query-migrate-capabilities" | "query-qmp-schema" => json!({"a": [1, null]}),
        "query-kvm" => json!(7),
        _ => truth(asked),
    };
    let vm = Vm::look(&mut monitor(odd)).unwrap();
    assert_eq!((vm.channels, vm.max_bandwidth, vm.downtime_limit), (2, None, 300));
    assert!(vm.capabilities.is_empty() && vm.compressors.is_empty() && !vm.kvm);
}
