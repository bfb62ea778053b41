//! The check of the precautions: what the kernel says of running processes, not what they meant to
//! do.
//!
//! Everything is read from `/proc`, `/sys` and the kernel's log, so that the check works on any
//! process, from another one. What cannot be read there is said to be [unseen](State::Unseen), not
//! taken for met.

mod disk;
mod process;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// How much an item matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// Without it the host may hang or lose what is swapped out.
    Required,
    /// Without it things are slower, or memory is used for nothing.
    Advised,
}

/// Whether something is as it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It is.
    Met,
    /// It is not.
    NotMet,
    /// Nothing outside the processes tells.
    Unseen,
}

/// One precaution.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What is looked at.
    pub name: &'static str,
    /// Whether it is as it must be.
    pub state: State,
    /// How much that matters.
    pub weight: Weight,
    /// What was found, and what to do where it is not met.
    pub found: String,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.state, self.weight) {
            (State::Met, _) => "met    ",
            (State::NotMet, Weight::Required) => "NOT MET",
            (State::NotMet, Weight::Advised) => "advice ",
            (State::Unseen, _) => "unseen ",
        };
        write!(f, "{state} {:<18} {}", self.name, self.found)
    }
}

/// Whether no item that is required is found not to be met.
pub fn all_required_met(items: &[Item]) -> bool {
    items.iter().all(|item| item.state != State::NotMet || item.weight == Weight::Advised)
}

/// What is checked.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// The processes: first the server, then its supervisor, and those that stand by.
    pub pids: &'a [u32],
    /// The disk that is swapped to, if there is one.
    pub disk: Option<&'a Path>,
    /// The name of the server's thread that finds memory ahead of need.
    pub keeper: &'a str,
    /// The store's memory as its server says it, if it was asked.
    pub memory: Option<Memory>,
}

/// Memory of a store, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Found ahead of need, and not used yet.
    pub ready: u64,
    /// The most that it may have; 0 for any amount.
    pub limit: u64,
}

/// What an item's function found: that it is met or not, or why nobody can tell.
type Found = Result<String, Not>;

/// Not met, or not to be seen, and why.
#[derive(Debug)]
enum Not {
    Met(String),
    Seen(String),
}

impl From<String> for Not {
    fn from(why: String) -> Self {
        Self::Met(why)
    }
}

/// Looks at all items.
pub fn check(subject: &Subject<'_>) -> Vec<Item> {
    let flusher = process::flusher_bits().map_err(|error| error.to_string());
    Eyes { root: PathBuf::from("/"), flusher, log: disk::kernel_log() }.check(subject)
}

/// Where things are looked up: the running system's files, or a test's.
struct Eyes {
    /// Below it are `proc` and `sys`.
    root: PathBuf,
    /// The flags of a thread that say that it is an I/O flusher.
    flusher: Result<u64, String>,
    /// What the kernel has said, or why that cannot be read.
    log: Result<Vec<String>, String>,
}

impl Eyes {
    fn check(&self, subject: &Subject<'_>) -> Vec<Item> {
        use Weight::{Advised, Required};
        let pids = subject.pids;
        let mut items = vec![
            item("io-flusher", Required, self.flushers(pids)),
            item("memory-locked", Required, self.locked(pids)),
            item("lock-limit", Required, self.lock_limit(pids)),
            item("no-allocation", Required, process::allocations()),
            item("keeper", Required, self.keeper(pids, subject.keeper, subject.memory)),
            item("oom-score", Required, self.oom(pids)),
            item("cgroup", Required, self.cgroup(pids)),
            item("says-elsewhere", Required, process::says_elsewhere()),
            item("mount-namespace", Required, self.mounts(pids)),
            item("no-core-dump", Required, self.cores(pids)),
        ];
        if let Some(disk) = subject.disk {
            items.push(item("swap-on", Required, self.swapped_to(disk)));
            items.push(item("discard", Required, self.discards(disk)));
            items.push(item("disk-queue", Advised, self.disk_queue(disk)));
            items.push(item("disk-cache", Advised, self.disk_cache(disk)));
        }
        items.push(item("page-cluster", Advised, self.page_cluster()));
        items.push(item("hibernation", Advised, self.hibernation()));
        items
    }

    fn read(&self, path: &str) -> Result<String, String> {
        fs::read_to_string(self.root.join(path))
            .map_err(|error| format!("cannot read /{path}: {error}"))
    }
}

fn item(name: &'static str, weight: Weight, found: Found) -> Item {
    let (state, found) = match found {
        Ok(found) => (State::Met, found),
        Err(Not::Met(found)) => (State::NotMet, found),
        Err(Not::Seen(found)) => (State::Unseen, found),
    };
    Item { name, state, weight, found }
}
