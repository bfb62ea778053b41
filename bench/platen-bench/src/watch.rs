//! A process that runs: the most memory it had, and the CPU time of its threads by name.
//!
//! The kernel shows both only while the process runs, so [`Watch::look`] is called now and then. A
//! thread's time after the last look is not counted.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use rustix::time::{clock_gettime, ClockId};

/// Counters seen of a process.
pub(crate) struct Watch {
    folder: PathBuf,
    peak_kib: u64,
    /// Name and nanoseconds of each thread, by its id.
    threads: HashMap<String, (String, u64)>,
}

impl Watch {
    /// Of the process with this id.
    pub(crate) fn new(pid: u32) -> Self {
        Self { folder: format!("/proc/{pid}").into(), peak_kib: 0, threads: HashMap::new() }
    }

    /// Reads the kernel's counters; a process that has ended keeps the last ones.
    pub(crate) fn look(&mut self) {
        let status = fs::read_to_string(self.folder.join("status")).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        self.peak_kib = self.peak_kib.max(peak.unwrap_or(0));
        for task in fs::read_dir(self.folder.join("task")).into_iter().flatten().flatten() {
            let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let used = read("schedstat").split_whitespace().next().and_then(|ns| ns.parse().ok());
            let Some(used) = used else { continue };
            let id = task.file_name().to_string_lossy().into_owned();
            let known = self.threads.entry(id).or_insert_with(|| (stage(&read("comm")), 0));
            known.1 = used;
        }
    }

    /// The most memory that was resident, KiB.
    pub(crate) fn peak_kib(&self) -> u64 {
        self.peak_kib
    }

    /// CPU seconds of all threads of each name.
    pub(crate) fn stages(&self) -> BTreeMap<String, f64> {
        let mut stages = BTreeMap::new();
        for (name, ns) in self.threads.values() {
            *stages.entry(name.clone()).or_insert(0.0) += seconds(*ns);
        }
        stages
    }

    /// CPU seconds of the busiest thread of each name.
    pub(crate) fn busiest(&self) -> BTreeMap<String, f64> {
        let mut busiest = BTreeMap::new();
        for (name, ns) in self.threads.values() {
            let most = busiest.entry(name.clone()).or_insert(0.0_f64);
            *most = most.max(seconds(*ns));
        }
        busiest
    }
}

/// Whole microseconds, which are short to write, as seconds.
fn seconds(ns: u64) -> f64 {
    (ns / 1000) as f64 / 1e6
}

/// CPU seconds of the calling thread so far.
pub(crate) fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Microseconds of CPU of this process's threads whose name begins with `name`
/// (`/proc/PID/task/TID/schedstat`).
pub(crate) fn threads_cpu(name: &str) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        let read = |name| std::fs::read_to_string(path.join(name));
        // A thread that ends meanwhile is not one of these.
        let (Ok(comm), Ok(text)) = (read("comm"), read("schedstat")) else { continue };
        if comm.starts_with(name) {
            let first = text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
            sum += first.context("schedstat without a number")? / 1e3;
        }
    }
    Ok(sum)
}

/// A thread's name without its number.
fn stage(comm: &str) -> String {
    let name = comm.trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
    if name.is_empty() { comm.trim() } else { name }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_its_threads_have_names_without_numbers() {
        let burning = std::thread::Builder::new().name("burner-7".into());
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = burning.spawn(move || {
            let sum = (0..3_000_000_u64).fold(0, |sum: u64, n| std::hint::black_box(sum ^ n));
            tell.send(sum).unwrap();
            wait.recv().unwrap();
        });
        told.recv().unwrap();
        let mut watch = Watch::new(std::process::id());
        watch.look();
        go.send(()).unwrap();
        thread.unwrap().join().unwrap();
        assert!(watch.peak_kib() > 100, "{} KiB", watch.peak_kib());
        assert!(watch.stages()["burner"] > 0.0, "{:?}", watch.stages());
        assert!(watch.busiest()["burner"] == watch.stages()["burner"], "{:?}", watch.busiest());
        assert_eq!(
            (stage("link-tx\n"), stage("compress12"), stage("7")),
            ("link-tx".into(), "compress".into(), "7".into())
        );
    }

    #[test]
    fn a_process_that_is_gone_shows_nothing() {
        let mut watch = Watch::new(u32::MAX);
        watch.look();
        assert!(watch.peak_kib() == 0 && watch.stages().is_empty());
    }
}
