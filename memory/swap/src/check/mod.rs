//! The check of the precautions. It reports the state of running processes according to the kernel,
//! not their intentions.
//!
//! Everything is read from `/proc`, `/sys` and the kernel's log, so that one process can check any
//! other. A precaution that cannot be read there is [unseen](State::Unseen), not met.

mod disk;
mod process;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// How important an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// Without it the host may hang, or lose swapped-out pages.
    Required,
    /// Without it the device is slower, or wastes memory.
    Advised,
}

/// Whether a precaution is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The precaution is taken.
    Met,
    /// The precaution is not taken.
    NotMet,
    /// The precaution cannot be observed from outside the process.
    Unseen,
}

/// The result of checking one precaution.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// The name of the precaution.
    pub name: &'static str,
    /// Whether the precaution is taken.
    pub state: State,
    /// The importance of the precaution.
    pub weight: Weight,
    /// The evidence, and the remedy if the precaution is not taken.
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

/// Whether no required item is [`State::NotMet`].
pub fn all_required_met(items: &[Item]) -> bool {
    items.iter().all(|item| item.state != State::NotMet || item.weight == Weight::Advised)
}

/// The subject of a check.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// The processes: first the server, then its supervisor and stand-by servers.
    pub pids: &'a [u32],
    /// The disk that is swapped to, if there is one.
    pub disk: Option<&'a Path>,
    /// The name of the server's thread that allocates memory ahead of need.
    pub keeper: &'a str,
    /// The memory of the store according to its server; `None` if the server was not asked.
    pub memory: Option<Memory>,
}

/// Memory of a store, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Allocated ahead of need, and not used yet.
    pub ready: u64,
    /// The limit; 0 for none.
    pub limit: u64,
}

/// The result of one check: the evidence that the precaution is taken, or the reason why it is not
/// taken or unseen.
type Found = Result<String, Not>;

/// The precaution is not taken, or unseen, with the reason.
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

/// Checks all items.
pub fn check(subject: &Subject<'_>) -> Vec<Item> {
    let flusher = process::flusher_bits().map_err(|error| error.to_string());
    Eyes { root: PathBuf::from("/"), flusher, log: disk::kernel_log() }.check(subject)
}

/// The source of facts: the files of the running system, or those of a test.
struct Eyes {
    /// The folder that has `proc` and `sys`.
    root: PathBuf,
    /// The task flags that mark an I/O flusher.
    flusher: Result<u64, String>,
    /// The kernel's log, or why it cannot be read.
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
            item("output-threads", Required, process::output_threads()),
            item("mount-namespace", Required, self.mounts(pids)),
            item("no-core-dump", Required, self.cores(pids)),
        ];
        if let Some(disk) = subject.disk {
            items.push(item("swap-on", Required, self.swapped_to(disk)));
            items.push(item("discard", Required, self.discards(disk)));
            items.extend(self.ublk_driver(disk).map(|found| item("ublk-driver", Advised, found)));
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
