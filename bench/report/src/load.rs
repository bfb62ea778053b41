//! The share of the machine that other processes use, second by second.
//!
//! Time that the machine's CPUs were not idle, without that of this process and its descendants
//! and without kernel threads, which mostly work for the benchmark: the share of all CPU time. Time
//! in interrupts is left out for the same reason. A descendant whose parent has ended counts as
//! another process from then on.

use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// One second's shares, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Second {
    pub(crate) others: f64,
    /// The share that the machine's host took away.
    pub(crate) stolen: f64,
}

/// Watches the machine until it is stopped.
pub(crate) struct Watcher {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Second>>,
}

impl Watcher {
    pub(crate) fn start() -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            let mut seconds = Vec::new();
            let begin = Look::now();
            let mut before = begin;
            while stopped.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                let now = Look::now();
                seconds.extend(before.zip(now).and_then(|(before, now)| now.since(&before)));
                before = now;
            }
            // A step of less than a second has one look.
            if seconds.is_empty() {
                seconds.extend(begin.zip(Look::now()).and_then(|(begin, now)| now.since(&begin)));
            }
            seconds
        });
        Self { stop, thread }
    }

    /// All seconds so far.
    pub(crate) fn stop(self) -> Vec<Second> {
        // It may have ended by a panic, which it has printed.
        let _ = self.stop.send(());
        self.thread.join().unwrap_or_default()
    }
}

/// Clock ticks so far.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// User, nice and system.
    busy: u64,
    stolen: u64,
    all: u64,
    own: u64,
    kernel: u64,
}

impl Look {
    fn now() -> Option<Self> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let mut look = Self::of_machine(&stat)?;
        let mut processes = HashMap::new();
        for entry in fs::read_dir("/proc").ok()?.flatten() {
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // It may have ended by now.
            let text = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            if let Some(process) = Process::of(&text) {
                processes.insert(id, process);
            }
        }
        (look.own, look.kernel) = shares(&processes, std::process::id());
        Some(look)
    }

    fn of_machine(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        // user, nice, system, idle, iowait, irq, softirq, steal; a guest's time is in user.
        let [user, nice, system, idle, waiting, hard, soft, stolen, ..] = ticks[..] else {
            return None;
        };
        let busy = user + nice + system;
        let all = busy + idle + waiting + hard + soft + stolen;
        Some(Self { busy, stolen, all, own: 0, kernel: 0 })
    }

    fn since(&self, before: &Self) -> Option<Second> {
        let of = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let all = of(self.all, before.all);
        let mine = of(self.own, before.own) + of(self.kernel, before.kernel);
        let others = (of(self.busy, before.busy) - mine).max(0.0);
        let stolen = of(self.stolen, before.stolen);
        let rounded = |ticks: f64| (ticks / all * 1000.0).round() / 1000.0;
        (all > 0.0).then(|| Second { others: rounded(others), stolen: rounded(stolen) })
    }
}

/// A process: its parent and its ticks, those of children that it has waited for included.
struct Process {
    parent: u32,
    ticks: u64,
}

impl Process {
    fn of(stat: &str) -> Option<Self> {
        // The name before it may have any character.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        let ticks = number(11)? + number(12)? + number(13)? + number(14)?;
        Some(Self { parent: u32::try_from(number(1)?).ok()?, ticks })
    }
}

/// Ticks of the tree below `root`, and of kernel threads.
fn shares(processes: &HashMap<u32, Process>, root: u32) -> (u64, u64) {
    /// The parent of all kernel threads.
    const KTHREADD: u32 = 2;
    let (mut own, mut kernel) = (0, 0);
    for (id, process) in processes {
        if *id == KTHREADD || process.parent == KTHREADD {
            kernel += process.ticks;
            continue;
        }
        let mut at = *id;
        // Ids are read one after the other, so that a circle is possible, if hardly.
        for _ in 0..64 {
            if at == root {
                own += process.ticks;
                break;
            }
            match processes.get(&at) {
                Some(process) => at = process.parent,
                None => break,
            }
        }
    }
    (own, kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_what_remains() {
        let before = Look::of_machine("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 ...").unwrap();
        let mut now = Look::of_machine("cpu  160 10 80 850 50 0 0 50 0 0").unwrap();
        (now.own, now.kernel) = (60, 20);
        let second = now.since(&before).unwrap();
        // 100 of 200 ticks were busy, 80 of them ours or the kernel's, and 50 were stolen.
        assert_eq!(second, Second { others: 0.1, stolen: 0.25 });
        assert_eq!(before.since(&before), None);
        assert!(Look::of_machine("cpu  1 2").is_none());
    }

    #[test]
    fn descendants_are_ours_and_kernel_threads_are_nobody_s() {
        let line = |name: &str, parent: u32, ticks: u64| {
            Process::of(&format!("7 ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 1 0 20 0"))
                .unwrap()
        };
        let processes = HashMap::from([
            (1, line("init", 0, 5)),
            (2, line("kthreadd", 0, 6)),
            (9, line("kworker/0:1", 2, 10)),
            (100, line("report", 1, 20)),
            (101, line("a ) b", 100, 30)),
            (102, line("grandchild", 101, 40)),
            (200, line("stranger", 1, 50)),
        ]);
        assert_eq!(shares(&processes, 100), (21 + 31 + 41, 7 + 11));
        assert!(Process::of("7 (cut) S 1").is_none());
    }

    #[test]
    fn a_thread_that_burns_is_not_another_process() {
        let before = Look::now().unwrap();
        // The kernel counts in ticks; on a busy machine it may take a while to get some.
        let start = std::time::Instant::now();
        while Look::now().unwrap().own < before.own + 5 {
            assert!(start.elapsed() < Duration::from_secs(300), "none of the time is ours");
            std::hint::black_box(
                (0..1_000_000_u64).fold(0, |sum, n| std::hint::black_box(sum ^ n)),
            );
        }
    }
}
