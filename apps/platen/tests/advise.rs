//! `platen advise` as a program: machines that are not here, and monitors and peers that lie.

use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

fn advise(words: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_platen");
    Command::new(program).args(["advise", "--seconds", "1"]).args(words).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A monitor that answers each command as `answer` says, and then ends.
fn monitor(folder: &Path, answer: impl Fn(&str) -> Value + Send + 'static) -> String {
    let path = folder.join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let mut writer = socket.try_clone().unwrap();
        let greeting = json!({"QMP": {"version": {"qemu": {"major": 9, "minor": 1, "micro": 0}}}});
        let _ = writeln!(writer, "{greeting}");
        for line in BufReader::new(socket).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            let result = answer(asked["execute"].as_str().unwrap_or_default());
            let _ = writeln!(writer, "{}", json!({"return": result, "id": asked["id"]}));
        }
    });
    format!("unix:{}", path.display())
}

/// Answers of a QEMU with a guest of 1 GiB.
fn usual(command: &str) -> Value {
    match command {
        "query-status" => json!({"status": "running", "running": true}),
        "query-memory-size-summary" => json!({"base-memory": 1 << 30}),
        "query-cpus-fast" => json!([{}]),
        "query-migrate-parameters" => json!({"downtime-limit": 300}),
        "human-monitor-command" => json!(
            "FlatView #1\n AS \"memory\"\n  0000000000000000-000000003fffffff (prio 0, ram): pc.ram\n"
        ),
        _ => json!({}),
    }
}

#[test]
fn machines_that_are_not_here_get_an_answer_each() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("advice.json");
    let far = "link=25g,cores=32,ram=256G,dirty=500M/s,rtt=0.1";
    let slow = "link=100m,cores=2,ram=4G,data=1G,dirty=200M/s";
    let output =
        advise(&["--what-if", far, "--what-if", slow, "--json", &json.display().to_string()]);
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("25000 Mbit/s (not measured)") && text.contains("built-in pages"),
        "{text}"
    );
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let [far, slow] = [&report["advice"][0], &report["advice"][1]];
    assert_eq!((&far["ram"], &far["cores"]), (&json!(256_u64 << 30), &json!(32.0)));
    assert_eq!(slow["data"], json!(1 << 30));
    // 200 MiB/s of writes over 12.5 MB/s: nothing converges, and each says why.
    assert!(slow.get("method").is_none(), "{slow}");
    for one in slow["alternatives"].as_array().unwrap() {
        assert_eq!(one["verdict"], "never", "{one}");
        assert!(one["not-converging"].as_str().unwrap().contains("dirties"), "{one}");
    }
    let bad = advise(&["--what-if", "link=fast"]);
    assert!(!bad.status.success() && said(&bad).contains("25g"), "{}", said(&bad));
}

/// Regression: QAT devices could be imagined, and IAA devices could not, so that no command told
/// what the rules say of a machine with both.
#[test]
fn iaa_devices_that_are_not_here_count_in_the_rules() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("advice.json");
    let machines = ["qat=1,iaa=4", "qat=4,iaa=1", "iaa=0"];
    let machines = machines.map(|devices| format!("link=100m,ram=4G,{devices}"));
    let mut words = vec!["--json", json.to_str().unwrap()];
    words.extend(machines.iter().flat_map(|machine| ["--what-if", machine]));
    let output = advise(&words);
    assert!(output.status.success(), "{}", said(&output));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let rule = |nth: usize, name: &str| {
        let rules = report["advice"][nth]["rules"].as_array().unwrap();
        let found = rules.iter().find(|rule| rule["rule"].as_str().unwrap().starts_with(name));
        found.unwrap().clone()
    };
    let of_qpl = rule(0, "qpl in all other cases");
    assert_eq!(of_qpl["applies"], true, "{of_qpl}");
    let because = of_qpl["because"].as_str().unwrap();
    assert!(because.contains("1 usable QAT devices and 4 usable IAA devices"), "{because}");
    assert_eq!(rule(0, "qatzip where the network")["applies"], false);
    assert_eq!(rule(1, "qatzip where the network")["applies"], true);
    assert_eq!(rule(2, "qpl in all other cases")["applies"], false);
    // Nothing is forecast of a device that platen has never run on.
    let assumed = |nth: usize| report["advice"][nth]["assumed"].to_string();
    assert!(assumed(0).contains("an IAA device has no forecast"), "{}", assumed(0));
    assert!(!assumed(2).contains("IAA device has no forecast"), "{}", assumed(2));
}

/// The report is the only result of this command.
#[test]
fn a_report_that_cannot_be_written_is_an_error() {
    let output = advise(&["--what-if", "link=1g,ram=1G", "--json", "/dev/full"]);
    assert!(!output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("cannot write the report to /dev/full"), "{}", said(&output));
}

#[test]
fn a_monitor_that_lies_is_named_with_what_it_said() {
    for (command, answer, words) in [
        (
            "query-memory-size-summary",
            json!({"base-memory": "much"}),
            ["query-memory-size", "much"],
        ),
        ("query-cpus-fast", json!(null), ["query-cpus-fast", "0 vCPUs"]),
        ("query-dirty-rate", json!({"status": "measured", "dirty-rate": -7}), ["dirty-rate", "-7"]),
        ("human-monitor-command", json!("no map"), ["info mtree", "no RAM"]),
        // Nothing was written to the file.
        ("pmemsave", json!({}), ["cannot read the sample", "sample"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let lie = move |asked: &str| if asked == command { answer.clone() } else { usual(asked) };
        let qmp = monitor(folder.path(), lie);
        // Without the sample of the memory, to come as far as the dirty rate.
        let what = if command == "query-dirty-rate" { "--sample" } else { "--sample-memory" };
        let output = advise(&["--qmp", &qmp, what]);
        let said = said(&output);
        assert!(!output.status.success() && said.contains("monitor unix:"), "{command}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{command}: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_monitor_that_is_none_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let _ = socket.write_all(b"220 mail.example ESMTP\r\n");
        let _ = socket.read(&mut [0; 100]);
    });
    let output = advise(&["--qmp", &format!("unix:{}", path.display())]);
    assert!(!output.status.success() && said(&output).contains("220 mail"), "{}", said(&output));
}

#[test]
fn a_peer_that_answers_nonsense_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let mut socket = socket;
            let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let _ = socket.read(&mut [0; 1000]);
        }
    });
    let output = advise(&["--peer", &peer, "--insecure"]);
    let said = said(&output);
    assert!(!output.status.success() && said.contains(&peer), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}
