//! Dictionaries of a device that is served: trained by a process of its own, which may do what it
//! likes.

use super::{have, replace, run, Served, MIB};
use rustix::process::{kill_process, Pid, Signal};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Pages that have long names in common, each once, and values that are their own.
fn records(pages: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut all = Vec::with_capacity((pages + 1) * 4096);
    for number in 0..pages {
        for field in 0_u64..120 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let name = (field + 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
            all.extend_from_slice(format!("{name:020x}=<{state:016x}>").as_bytes());
        }
        all.truncate((number + 1) * 4096);
    }
    all
}

/// A kernel's pressure file while memory is short, and while it is not.
const SHORT: &str = "some avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
const NOT_SHORT: &str = "some avg10=00.00 avg60=0.00 avg300=0.00 total=0\n";

/// Trains as soon as there is something to train on, and takes a file of `folder` for the kernel's
/// word on memory.
fn dictionary_policy(folder: &Path) -> String {
    let pressure = folder.join("pressure").display().to_string();
    format!("[policy]\ndictionary_pages = 4096\n[policy.pressure]\nfile = \"{pressure}\"\n")
}

#[test]
fn a_dictionary_is_trained_apart_and_outlives_its_server() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    let pressure = folder.path().join("pressure");
    // Nothing is trained before all pages are there, however slowly they come.
    fs::write(&pressure, SHORT).unwrap();
    fs::write(&policy, dictionary_policy(folder.path())).unwrap();
    let served = Served::new(&["--size", "64M", "--policy", policy.to_str().unwrap()]);
    let image = records(20 * MIB / 4096);
    let copy = served.path("copy");
    fs::write(served.path("image"), &image).unwrap();
    let put = || run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    put();
    let plain = served.stat()["mm_stat"]["compr_data_size"].as_u64().unwrap();
    // Independent of this machine's own pressure.
    fs::write(&pressure, NOT_SHORT).unwrap();
    wait_for_a_dictionary(&served);
    put();
    let stat = served.stat();
    let of = &stat["dictionaries"];
    assert_eq!(of["dictionary_pages"].as_u64().unwrap(), image.len() as u64 / 4096, "{of}");
    assert!(of["dictionary_gain"].as_u64().unwrap() >= 300, "{of}");
    let with = stat["mm_stat"]["compr_data_size"].as_u64().unwrap();
    assert!(with * 100 < plain * 97, "{with} of {plain}");
    let compare = || {
        run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
        assert!(
            fs::read(&copy).unwrap()[..image.len()] == image,
            "what came back is not what was put in"
        );
    };
    compare();
    replace(&served, 2);
    let after = served.stat();
    assert_eq!(after["dictionaries"]["dictionary_pages"], of["dictionary_pages"]);
    assert_eq!(after["dictionaries"]["dictionary_gain"], of["dictionary_gain"]);
    compare();
    // The next one writes with it, too.
    put();
    assert_eq!(served.stat()["mm_stat"]["compr_data_size"].as_u64().unwrap(), with);
    compare();
    assert_eq!(served.stat()["io_stat"]["failed_reads"], 0);
    served.end();
}

/// A device full of records whose trainer has been stopped in the middle of its work: the folder of
/// its settings, the device, what is on it, and the trainer. `None` if it was too fast to be
/// stopped, whatever was tried.
fn with_a_trainer_that_hangs() -> Option<(tempfile::TempDir, Served, Vec<u8>, Pid)> {
    for _ in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let (policy, pressure) = (folder.path().join("policy"), folder.path().join("pressure"));
        fs::write(&pressure, SHORT).unwrap();
        fs::write(&policy, dictionary_policy(folder.path())).unwrap();
        let served = Served::new(&["--size", "64M", "--policy", policy.to_str().unwrap()]);
        let image = records(20 * MIB / 4096);
        fs::write(served.path("image"), &image).unwrap();
        run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
        let start = Instant::now();
        // While memory is short no training starts, and a message reports that.
        while served.stat()["policy"]["dictionary_pressed"].as_u64().unwrap_or(0) == 0 {
            assert!(start.elapsed() < Duration::from_secs(300), "{}", served.stat());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(served.stat()["policy"]["dictionary_rounds"], 0);
        fs::write(&pressure, NOT_SHORT).unwrap();
        let supervisor = served.child.id();
        loop {
            if let Some(trainer) = trainer_of(supervisor) {
                let stopped = kill_process(trainer, Signal::STOP).is_ok() && stops(trainer);
                // Not before it has become what it is to be, and not after it has ended.
                if stopped && is_apart(trainer) {
                    return Some((folder, served, image, trainer));
                }
                let _ = kill_process(trainer, Signal::CONT);
            } else if served.stat()["dictionaries"]["dictionaries"] == 1 {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(300), "no trainer: {}", served.stat());
        }
        served.end();
    }
    None
}

/// The child of this process that trains.
fn trainer_of(supervisor: u32) -> Option<Pid> {
    let children = format!("/proc/{supervisor}/task/{supervisor}/children");
    let children = fs::read_to_string(children).unwrap_or_default();
    let trains = |child: &&str| {
        let line = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        line.ends_with(b"\0device\0train\0")
    };
    children.split_whitespace().find(trains).and_then(|child| Pid::from_raw(child.parse().ok()?))
}

/// Waits until a process has stopped; false if it ends first.
fn stops(process: Pid) -> bool {
    let start = Instant::now();
    loop {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
        let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
        match state {
            Some('T') => return true,
            None | Some('Z' | 'X') => return false,
            // It waits for a CPU.
            _ => assert!(start.elapsed() < Duration::from_secs(300), "it does not stop"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a trainer has done what it does before all else, and is there yet.
fn is_apart(trainer: Pid) -> bool {
    let score = format!("/proc/{}/oom_score_adj", trainer.as_raw_nonzero());
    fs::read_to_string(score).is_ok_and(|score| score.trim() == "1000") && limits(trainer).is_some()
}

/// Its limits on address space and CPU, when it has them.
fn limits(trainer: Pid) -> Option<String> {
    let limits = fs::read_to_string(format!("/proc/{}/limits", trainer.as_raw_nonzero())).ok()?;
    let of = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next().map(str::to_owned)
    };
    let all = format!("{} {}", of("Max address space")?, of("Max cpu time")?);
    // The last that it sets.
    (of("Max core file size")? == "0" && !all.contains("unlimited")).then_some(all)
}

fn wait_for_end_of(process: Pid) {
    let start = Instant::now();
    while rustix::process::test_kill_process(process).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(300), "it is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the result of training. A busy machine may leave a trainer of nice 19 without CPU for
/// minutes, so the trainer gets the priority of this test, if this test may give it.
fn wait_for_a_dictionary(served: &Served) {
    let start = Instant::now();
    let supervisor = served.child.id();
    while served.stat()["dictionaries"]["dictionaries"] != 1 {
        if let Some(trainer) = trainer_of(supervisor) {
            let _ = rustix::process::setpriority_process(Some(trainer), 0);
        }
        assert!(start.elapsed() < Duration::from_secs(900), "none is trained: {}", served.stat());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_trainer_has_limits_and_no_descriptor_of_the_server_and_ends_when_memory_is_short() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let (folder, served, image, trainer) = with_a_trainer_that_hangs().expect("one was stopped");
    let of = |what: &str| format!("/proc/{}/{what}", trainer.as_raw_nonzero());
    let mut open: Vec<_> = fs::read_dir(of("fd"))
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let to = fs::read_link(entry.path()).unwrap_or_default();
            (entry.file_name(), to.display().to_string())
        })
        .collect();
    open.sort();
    // Its other copies of the socket come and go.
    assert!(open.iter().all(|(_, to)| to.starts_with("socket:") || to == "/dev/null"), "{open:?}");
    assert!(open[0].1 == "/dev/null" && open[2].1 == "/dev/null", "{open:?}");
    assert_eq!(limits(trainer).unwrap(), format!("{} 60", 512 << 20));
    let stat = fs::read_to_string(of("stat")).unwrap();
    let nice = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(16).unwrap().to_owned();
    assert_eq!(nice, "19");
    // Neither the device nor its policy waits for it.
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    fs::write(folder.path().join("pressure"), SHORT).unwrap();
    wait_for_end_of(trainer);
    let policy = &served.stat()["policy"];
    assert!(policy["dictionary_pressed"].as_u64().unwrap() >= 2, "{policy}");
    assert_eq!((&policy["dictionary_rounds"], &policy["dictionary_late"]), (&1.into(), &0.into()));
    let copy = served.path("copy");
    run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
    assert!(fs::read(&copy).unwrap()[..image.len()] == image, "another content");
    let log = served.end();
    assert!(!log.contains("trainer"), "it was wished: {log}");
}

#[test]
fn a_server_killed_while_a_trainer_runs_is_replaced_and_its_successor_starts_another_trainer() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let (_folder, served, image, trainer) = with_a_trainer_that_hangs().expect("one was stopped");
    replace(&served, 2);
    wait_for_end_of(trainer);
    wait_for_a_dictionary(&served);
    assert_eq!(served.stat()["policy"]["dictionary_rounds"], 1, "the successor's own");
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    let stat = served.stat();
    assert_eq!(stat["dictionaries"]["dictionary_pages"], image.len() / 4096);
    let copy = served.path("copy");
    run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
    assert!(fs::read(&copy).unwrap()[..image.len()] == image, "another content");
    assert_eq!(stat["io_stat"]["failed_reads"], 0);
    served.end();
}
