//! Reports when the OOM killer has killed a server, and by which limit.

use std::fs;
use std::path::{Path, PathBuf};

/// The OOM kill counter of this process's cgroup, which is also its servers'.
#[derive(Debug)]
pub(super) struct OomKills {
    root: PathBuf,
    /// The cgroup; `None` without a unified hierarchy.
    cgroup: Option<PathBuf>,
    killed: u64,
    /// Other processes than a server that SIGKILL has ended since the last look at the counter.
    others: u64,
}

impl OomKills {
    /// Counts the kills in the cgroup that a text like `/proc/self/cgroup` names, below `root`.
    pub(super) fn new(root: &Path, cgroups: &str) -> Self {
        let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
        let cgroup = path.map(|path| root.join(path.trim_start_matches('/')));
        let mut this = Self { root: root.to_owned(), cgroup, killed: 0, others: 0 };
        this.killed = this.count();
        this
    }

    /// Counts the kills in this process's cgroup.
    pub(super) fn own() -> Self {
        let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::new(Path::new("/sys/fs/cgroup"), &cgroups)
    }

    fn count(&self) -> u64 {
        let events = self.cgroup.as_ref().map(|path| path.join("memory.events"));
        let events = events.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// Records that SIGKILL, which the supervisor did not send, has ended another process than a
    /// server. Does not read the counter, which takes memory: a server may just have died too.
    pub(super) fn another_was_killed(&mut self) {
        self.others += 1;
    }

    /// Attributes the kills since the last look to the [others](Self::another_was_killed), if there
    /// are any.
    pub(super) fn settle(&mut self) {
        if self.others > 0 {
            self.killed = self.count().min(self.killed + self.others);
            self.others = 0;
        }
    }

    /// Returns a message if there was a kill since the last call, beside those of others. The
    /// caller has seen that SIGKILL has ended a server, and has not sent it.
    pub(super) fn since(&mut self) -> Option<String> {
        let before = self.killed + std::mem::take(&mut self.others);
        self.killed = self.count();
        if self.killed <= before {
            return None;
        }
        let said = match self.limit() {
            Some((cgroup, limit)) => format!(
                "the kernel has killed it for want of memory: cgroup {} may have {limit} bytes \
                 (memory.max); raise that, or give the device less by --mem-limit and --reserve",
                cgroup.display()
            ),
            None => "the kernel has killed it for want of memory: the machine has none left".into(),
        };
        Some(said)
    }

    /// The nearest memory limit at or above the cgroup.
    fn limit(&self) -> Option<(PathBuf, u64)> {
        let own = self.cgroup.as_ref()?;
        own.ancestors().take_while(|path| path.starts_with(&self.root)).find_map(|path| {
            let limit = fs::read_to_string(path.join("memory.max")).ok()?;
            let name = path.strip_prefix(&self.root).unwrap_or(path);
            Some((Path::new("/").join(name), limit.trim().parse().ok()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_is_reported_once_with_the_limit_of_its_cgroup() {
        let root = tempfile::tempdir().unwrap();
        let unit = root.path().join("system.slice/swap.service");
        fs::create_dir_all(&unit).unwrap();
        let events =
            |count| fs::write(unit.join("memory.events"), format!("oom 3\noom_kill {count}\n"));
        events(2).unwrap();
        fs::write(unit.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("system.slice/memory.max"), "50331648\n").unwrap();
        let mut kills = OomKills::new(root.path(), "1:cpu:/x\n0::/system.slice/swap.service\n");
        assert_eq!(kills.since(), None);
        events(3).unwrap();
        let said = kills.since().unwrap();
        assert!(said.contains("cgroup /system.slice may have 50331648 bytes"), "{said}");
        assert_eq!(kills.since(), None);
        fs::remove_file(root.path().join("system.slice/memory.max")).unwrap();
        events(4).unwrap();
        assert!(kills.since().unwrap().contains("the machine has none left"));
        // Of a trainer and a server that died together, the server's kill is reported too.
        events(6).unwrap();
        kills.another_was_killed();
        assert!(kills.since().is_some());
        events(7).unwrap();
        kills.another_was_killed();
        assert_eq!(kills.since(), None);
        // A trainer that a user killed hides no later kill.
        kills.another_was_killed();
        kills.settle();
        events(8).unwrap();
        assert!(kills.since().is_some());
        let mut none = OomKills::new(root.path(), "1:cpu:/x\n");
        assert_eq!(none.since(), None);
    }
}
