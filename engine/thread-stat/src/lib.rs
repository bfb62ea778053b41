//! The kernel's facts about the threads of a process, for watchdogs: a thread that does nothing may
//! hang, or it may have got no CPU.
//!
//! The facts come from `/proc/PID/task/TID/stat` and `schedstat`. A kernel without `schedstat`
//! counts no wake-ups, and its CPU times have the resolution of a tick.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::time::Duration;

/// The kernel's facts about a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadStat {
    /// The letter of the thread's state.
    pub state: u8,
    /// The CPU time that the thread has used.
    pub ran: Duration,
    /// How often the thread was scheduled.
    pub times: u64,
}

impl ThreadStat {
    /// Whether the thread waits for a CPU, and has not had one since `before`.
    pub fn starved_since(&self, before: &Self) -> bool {
        self.state == b'R' && (self.ran, self.times) == (before.ran, before.times)
    }
}

/// The source of facts about a process: the kernel, or a test.
pub trait Process {
    /// The facts about a thread; `None` if it has ended, or the kernel does not tell.
    fn thread(&mut self, thread: u32) -> Option<ThreadStat>;

    /// The numbers of all threads of the process.
    fn threads(&mut self) -> Vec<u32>;
}

/// All threads of a process, as they were at the last look.
#[derive(Debug, Default)]
pub struct Threads(Vec<(u32, ThreadStat)>);

impl Threads {
    /// Looks at all threads; returns whether one of them has waited for a CPU in vain since the
    /// last look.
    pub fn look(&mut self, process: &mut dyn Process) -> bool {
        let all: Vec<_> = process
            .threads()
            .into_iter()
            .filter_map(|thread| Some((thread, process.thread(thread)?)))
            .collect();
        let starved = all.iter().any(|(thread, stat)| {
            let before = self.0.iter().find(|(other, _)| other == thread);
            before.is_some_and(|(_, before)| stat.starved_since(before))
        });
        self.0 = all;
        starved
    }

    /// Forgets the last look.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

/// The kernel's facts about a process, from /proc.
#[derive(Clone, Copy, Debug)]
pub struct Proc {
    /// `None` for this process.
    process: Option<u32>,
}

impl Proc {
    /// The facts about this process.
    pub fn own() -> Self {
        Self { process: None }
    }

    /// The facts about another process.
    pub fn of(process: u32) -> Self {
        Self { process: Some(process) }
    }

    /// The time for which each thread of the process has waited for a CPU; empty on a kernel
    /// without `schedstat`.
    pub fn delayed(mut self) -> HashMap<u32, Duration> {
        let folder = self.folder();
        let delay = |thread| {
            let mut bytes = [0; 128];
            Some((thread, delay(read(&format!("{folder}/{thread}/schedstat"), &mut bytes)?)?))
        };
        self.threads().into_iter().filter_map(delay).collect()
    }

    fn folder(self) -> String {
        self.process.map_or("/proc/self/task".into(), |process| format!("/proc/{process}/task"))
    }
}

impl Process for Proc {
    fn thread(&mut self, thread: u32) -> Option<ThreadStat> {
        let folder = format!("{}/{thread}", self.folder());
        let mut bytes = [0; 1024];
        let stat = read(&format!("{folder}/stat"), &mut bytes)?;
        let mut bytes = [0; 128];
        let times = read(&format!("{folder}/schedstat"), &mut bytes).unwrap_or_default();
        parse(stat, times)
    }

    fn threads(&mut self) -> Vec<u32> {
        let tasks = fs::read_dir(self.folder());
        let number = |task: fs::DirEntry| task.file_name().to_str()?.parse().ok();
        tasks.into_iter().flatten().flatten().filter_map(number).collect()
    }
}

/// The facts in the texts of a thread's `stat` and `schedstat`; the second may be empty.
fn parse(stat: &str, times: &str) -> Option<ThreadStat> {
    // The name may contain brackets and blanks.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = *fields.next()?.as_bytes().first()?;
    let mut fields = fields.skip(10).map_while(|field| field.parse::<u64>().ok());
    let ticks = fields.next()? + fields.next()?;
    let mut fields = times.split_whitespace().map_while(|field| field.parse().ok());
    let ran = fields.next().map_or(Duration::from_millis(ticks * 10), Duration::from_nanos);
    Some(ThreadStat { state, ran, times: fields.nth(1).unwrap_or(0) })
}

/// The time in the text of a thread's `schedstat` for which it has waited for a CPU.
fn delay(times: &str) -> Option<Duration> {
    times.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

fn read<'a>(path: &str, bytes: &'a mut [u8]) -> Option<&'a str> {
    let got = fs::File::open(path).ok()?.read(bytes).ok()?;
    std::str::from_utf8(&bytes[..got]).ok()
}

#[cfg(test)]
mod tests;
