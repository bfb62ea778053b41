//! The check of the precautions: what the kernel says of a running server, not what the server meant to do.
//!
//! Everything is read from `/proc` and `/sys`, so that the check works on any process, from another one.

use std::fmt;
use std::fs;
use std::io;
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What is looked at.
    pub name: &'static str,
    /// Whether it is as it must be.
    pub met: bool,
    /// How much that matters.
    pub weight: Weight,
    /// What was found, and what to do where it is not met.
    pub found: String,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match (self.met, self.weight) {
            (true, _) => "met    ",
            (false, Weight::Required) => "NOT MET",
            (false, Weight::Advised) => "advice ",
        };
        write!(f, "{state} {:<18} {}", self.name, self.found)
    }
}

/// Whether every item that is required is met.
pub fn all_required_met(items: &[Item]) -> bool {
    items.iter().all(|item| item.met || item.weight == Weight::Advised)
}

/// What is checked.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// The processes: the server, its supervisor.
    pub pids: &'a [u32],
    /// The disk that is swapped to, if there is one.
    pub disk: Option<&'a Path>,
}

/// Looks at all items.
pub fn check(subject: &Subject<'_>) -> Vec<Item> {
    let mut items = vec![
        flushers(subject.pids),
        locked(subject.pids),
        lock_limit(subject.pids),
        oom(subject.pids),
        cores(subject.pids),
        cgroup(subject.pids),
        mounts(subject.pids),
    ];
    if let Some(disk) = subject.disk {
        items.push(swapped_to(disk));
        items.push(discards(disk));
        items.push(disk_queue(disk));
    }
    items.push(page_cluster());
    items
}

fn item(name: &'static str, weight: Weight, result: Result<String, String>) -> Item {
    let (met, found) = match result {
        Ok(found) => (true, found),
        Err(found) => (false, found),
    };
    Item { name, met, weight, found }
}

fn proc_path(pid: u32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

fn read(pid: u32, file: &str) -> Result<String, String> {
    let path = proc_path(pid, file);
    fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Every thread is an I/O flusher. The kernel shows it in the flags of a task, whose bits are its own
/// business: which ones they are is found by turning it off and on in a thread of this process.
fn flushers(pids: &[u32]) -> Item {
    let result = flusher_bits().map_err(|error| format!("cannot tell: {error}")).and_then(|bits| {
        let mut threads = 0;
        let mut without = Vec::new();
        for &pid in pids {
            let tasks =
                fs::read_dir(proc_path(pid, "task")).map_err(|error| format!("{pid}: {error}"))?;
            for task in tasks.flatten() {
                // A thread that has ended meanwhile has no flags.
                let Some(flags) = task_flags(&task.path()) else { continue };
                threads += 1;
                if flags & bits != bits {
                    without.push(task.file_name().to_string_lossy().into_owned());
                }
            }
        }
        if without.is_empty() && threads > 0 {
            Ok(format!("all {threads} threads are I/O flushers"))
        } else {
            Err(format!("threads {} of {threads} are no I/O flushers", without.join(", ")))
        }
    });
    item("io-flusher", Weight::Required, result)
}

fn task_flags(task: &Path) -> Option<u64> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    // The second field is a name in brackets that may have anything in it; flags are the ninth.
    stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse().ok()
}

/// The flags by which an I/O flusher differs from another thread.
fn flusher_bits() -> io::Result<u64> {
    let probe = || {
        let own = || task_flags(Path::new("/proc/thread-self")).ok_or(io::ErrorKind::InvalidData);
        use rustix::process::configure_io_flusher_behavior as flusher;
        flusher(false)?;
        let without = own()?;
        flusher(true)?;
        Ok(own()? & !without)
    };
    // In a thread of its own, for this one is to stay as it is.
    let probed = std::thread::spawn(probe).join();
    let bits: io::Result<u64> =
        probed.unwrap_or_else(|_| Err(io::Error::other("the probe panicked")));
    bits.and_then(|bits| {
        if bits == 0 {
            return Err(io::Error::other("the kernel does not show it"));
        }
        Ok(bits)
    })
}

/// Every mapping is locked, but those that the kernel or a driver makes and that are never swapped.
fn locked(pids: &[u32]) -> Item {
    let one = |&pid: &u32| {
        let unlocked = unlocked(&read(pid, "smaps")?);
        if let Some(first) = unlocked.first() {
            return Err(format!(
                "process {pid}: {} mappings not locked, as {first}",
                unlocked.len()
            ));
        }
        let status = read(pid, "status")?;
        Ok(format!("{pid} has {} KiB locked", field(&status, "VmLck:").unwrap_or("?")))
    };
    let result = pids.iter().map(one).collect::<Result<Vec<_>, _>>().map(|each| each.join(", "));
    item("memory-locked", Weight::Required, result)
}

/// Names of the mappings in `smaps` that are neither locked nor of a kind that cannot be.
fn unlocked(smaps: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut head = "";
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if !first.ends_with(':') {
            head = line;
            continue;
        }
        let Some(flags) = line.strip_prefix("VmFlags:") else { continue };
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let has = |flag| flags.contains(&flag);
        // Locked; or of pages without a page behind them (pf), of a device (io), or the kernel's own (in
        // brackets, which a heap and a stack are not).
        let name = head.split_whitespace().nth(5).unwrap_or_default();
        let kernels = matches!(name, "[vvar]" | "[vdso]" | "[vsyscall]" | "[vvar_vclock]");
        // A driver's memory is not swapped, and mlock leaves it out.
        let drivers = name.starts_with("/dev/ublkc") || name.starts_with("anon_inode:");
        // What nobody may touch has nothing in it: guard pages, address space kept for later.
        let reserve = !(has("rd") || has("wr") || has("ex"));
        if !(has("lo") || has("pf") || has("io") || kernels || drivers || reserve) {
            found.push(head.to_owned());
        }
    }
    found
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
}

fn limit<'a>(limits: &'a str, name: &str) -> Option<&'a str> {
    limits.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
}

fn lock_limit(pids: &[u32]) -> Item {
    let result =
        pids.iter().try_for_each(|&pid| match limit(&read(pid, "limits")?, "Max locked memory") {
            Some("unlimited") => Ok(()),
            other => Err(format!(
                "process {pid} may lock {} bytes: LimitMEMLOCK=infinity in its unit, or root",
                other.unwrap_or("?")
            )),
        });
    item(
        "lock-limit",
        Weight::Required,
        result.map(|()| "any amount of memory may be locked".into()),
    )
}

fn oom(pids: &[u32]) -> Item {
    let result = pids.iter().try_for_each(|&pid| match read(pid, "oom_score_adj")?.trim() {
        "-1000" => Ok(()),
        other => {
            Err(format!(
                "process {pid} has oom_score_adj {other}, not -1000, and may be killed: OOMScoreAdjust=-1000 in its unit, or root"
            ))
        }
    });
    item(
        "oom-score",
        Weight::Required,
        result.map(|()| "the kernel does not kill it for memory".into()),
    )
}

fn cores(pids: &[u32]) -> Item {
    let result =
        pids.iter().try_for_each(|&pid| match limit(&read(pid, "limits")?, "Max core file size") {
            Some("0") => Ok(()),
            other => Err(format!("process {pid} may dump {} bytes", other.unwrap_or("?"))),
        });
    item("no-core-dump", Weight::Required, result.map(|()| "none is written".into()))
}

fn cgroup(pids: &[u32]) -> Item {
    let result = pids.iter().try_for_each(|&pid| {
        let text = read(pid, "cgroup")?;
        let Some(path) = text.lines().find_map(|line| line.strip_prefix("0::")) else {
            return Err(
                "no unified cgroup hierarchy: nothing says that it is not swapped or limited"
                    .into(),
            );
        };
        let folder = Path::new("/sys/fs/cgroup").join(path.trim_start_matches('/'));
        let value =
            |file: &str| fs::read_to_string(folder.join(file)).map(|text| text.trim().to_owned());
        match (value("memory.swap.max"), value("memory.max")) {
            (Ok(swap), Ok(max)) if swap == "0" && max == "max" => Ok(()),
            (Ok(swap), Ok(max)) => Err(format!(
                "cgroup {path}: memory.swap.max {swap}, memory.max {max}; they should be 0 and max: {}",
                remedy(path)
            )),
            _ => Err(format!("cgroup {path} has no memory controller: {}", remedy(path))),
        }
    });
    item(
        "cgroup",
        Weight::Required,
        result.map(|()| "its own cgroup has no swap and no limit".into()),
    )
}

/// What makes a cgroup one without swap and limit: whose it is can be seen by its name.
fn remedy(path: &str) -> &'static str {
    let last = path.rsplit('/').next().unwrap_or_default();
    match last.rsplit_once('.') {
        Some((_, "service")) => {
            "MemorySwapMax=0 and MemoryMax=infinity in its unit (docs/swap.md has one)"
        }
        Some((_, "scope" | "slice")) => {
            "start platen as a service with MemorySwapMax=0, `systemd-run -p MemorySwapMax=0 platen ...` for one"
        }
        _ if path == "/" => "let platen make a cgroup of its own (root, cgroup v2, writable)",
        _ => "echo 0 > memory.swap.max and echo max > memory.max there, or start platen elsewhere",
    }
}

fn mounts(pids: &[u32]) -> Item {
    let namespace = |pid| {
        fs::read_link(proc_path(pid, "ns/mnt")).map_err(|error| format!("process {pid}: {error}"))
    };
    let result = namespace(1).and_then(|first| {
        pids.iter().try_for_each(|&pid| {
            if namespace(pid)? == first {
                return Err(format!(
                    "process {pid} has the mounts of everybody: a disk of its own might be one"
                ));
            }
            Ok(())
        })
    });
    item("mount-namespace", Weight::Required, result.map(|()| "its own".into()))
}

fn swapped_to(disk: &Path) -> Item {
    let result =
        crate::area::in_use(disk).map_err(|error| format!("cannot read /proc/swaps: {error}"));
    let result = result.and_then(|used| match used {
        Some(used) => {
            Ok(format!("{}: {} of {} KiB used", disk.display(), used.used_kib, used.size_kib))
        }
        None => Err(format!("{} is not in /proc/swaps", disk.display())),
    });
    item("swap-on", Weight::Required, result)
}

fn queue_value(disk: &Path, name: &str) -> Result<u64, String> {
    let device = disk.file_name().unwrap_or_default();
    let path = Path::new("/sys/class/block").join(device).join("queue").join(name);
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    text.trim().parse().map_err(|_| format!("{}: {text:?}", path.display()))
}

fn discards(disk: &Path) -> Item {
    let result = queue_value(disk, "discard_max_bytes").and_then(|max| {
        let granularity = queue_value(disk, "discard_granularity")?;
        if max == 0 || granularity > 4096 {
            return Err(format!(
                "{max} bytes at a time, in units of {granularity}: freed swap stays stored"
            ));
        }
        Ok(format!("freed swap is discarded, in units of {granularity} bytes"))
    });
    item("discard", Weight::Required, result)
}

fn disk_queue(disk: &Path) -> Item {
    let result = queue_value(disk, "rotational").and_then(|rotational| {
        let block = queue_value(disk, "logical_block_size")?;
        if rotational != 0 || block != 4096 {
            return Err(format!(
                "rotational {rotational}, blocks of {block} bytes; not 0 and 4096"
            ));
        }
        Ok("not rotational, blocks of 4096 bytes".into())
    });
    item("disk-queue", Weight::Advised, result)
}

fn page_cluster() -> Item {
    let result = fs::read_to_string("/proc/sys/vm/page-cluster").map_err(|error| error.to_string());
    let result = result.and_then(|value| match value.trim() {
        "0" => Ok("pages are read one at a time".into()),
        other => Err(format!(
            "{other}: each fault reads 2^{other} pages, decompressing what may not be wanted; sysctl vm.page-cluster=0"
        )),
    });
    item("page-cluster", Weight::Advised, result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_found_behind_a_name_with_brackets() {
        let folder = tempfile::tempdir().unwrap();
        let stat = "77 (a) b (c)) S 1 77 77 0 -1 4194560 99 0";
        fs::write(folder.path().join("stat"), stat).unwrap();
        assert_eq!(task_flags(folder.path()), Some(4_194_560));
        fs::write(folder.path().join("stat"), "77").unwrap();
        assert_eq!(task_flags(folder.path()), None);
    }

    #[test]
    fn a_mapping_that_is_not_locked_is_named() {
        let smaps = "\
7f00-7f01 rw-p 00000000 00:00 0                          [heap]
Size:                  4 kB
VmFlags: rd wr mr mw me lo ac
7f10-7f20 r--p 00000000 00:00 0                          [vvar]
VmFlags: rd mr pf io de dd
7f20-7f21 ---p 00000000 00:00 0
VmFlags: mr mw me
7f30-7f40 r-xp 00000000 08:01 99                         /usr/lib/libc.so.6
VmFlags: rd ex mr mw me
7f40-7f50 r--s 00000000 00:05 99                         /dev/ublkc0
VmFlags: rd sh mr
";
        let found = unlocked(smaps);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].ends_with("libc.so.6"));
        assert_eq!(unlocked(""), Vec::<String>::new());
    }

    #[test]
    fn this_process_which_took_no_precautions_is_found_out() {
        let own = [std::process::id()];
        let items = check(&Subject { pids: &own, disk: Some(Path::new("/dev/null")) });
        let met = |name| items.iter().find(|item| item.name == name).unwrap().met;
        assert!(!met("memory-locked") && !met("swap-on") && !met("discard"));
        assert!(!all_required_met(&items));
        for item in &items {
            println!("{item}");
            assert!(!item.found.is_empty());
        }
    }

    #[test]
    fn a_cgroup_that_is_somebodys_is_said_with_what_to_do() {
        for (path, what) in [
            ("/system.slice/platen.service", "in its unit"),
            ("/user.slice/user-0.slice/session-3.scope", "systemd-run"),
            ("/", "make a cgroup"),
            ("/lxc/web", "memory.swap.max"),
        ] {
            assert!(remedy(path).contains(what), "{path}: {}", remedy(path));
        }
    }

    #[test]
    fn what_is_only_advised_does_not_fail_the_check() {
        let advised = Item {
            name: "page-cluster",
            met: false,
            weight: Weight::Advised,
            found: String::new(),
        };
        let required = Item { name: "oom-score", weight: Weight::Required, ..advised.clone() };
        assert!(all_required_met(std::slice::from_ref(&advised)));
        assert!(!all_required_met(&[advised, required]));
    }
}
