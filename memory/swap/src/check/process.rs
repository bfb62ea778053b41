//! Checks of each process's precautions.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Eyes, Found, Memory, Not};

impl Eyes {
    /// Checks that every thread is an I/O flusher. The kernel shows that in the task's flags, whose
    /// bits are not part of its API. `flusher_bits` finds these bits by turning the setting off and
    /// on in a thread of this process.
    pub(super) fn flushers(&self, pids: &[u32]) -> Found {
        let bits = self.flusher.as_ref().map_err(|why| Not::Seen(format!("cannot tell: {why}")))?;
        let mut threads = 0;
        let mut without = Vec::new();
        for &pid in pids {
            for task in self.tasks(pid)? {
                // A thread that has ended meanwhile has no flags.
                let Some(flags) = task_flags(&task) else { continue };
                threads += 1;
                if flags & bits != *bits {
                    without.push(task.file_name().unwrap_or_default().to_string_lossy().into());
                }
            }
        }
        if without.is_empty() && threads > 0 {
            return Ok(format!(
                "all {threads} threads of {} processes are I/O flushers",
                pids.len()
            ));
        }
        let without: Vec<String> = without;
        Err(format!(
            "threads {} of {threads} are no I/O flushers: serve it as root",
            without.join(", ")
        )
        .into())
    }

    /// The `/proc` folders of a process's threads.
    fn tasks(&self, pid: u32) -> Result<Vec<PathBuf>, String> {
        let folder = self.root.join(format!("proc/{pid}/task"));
        let tasks = fs::read_dir(folder).map_err(|error| format!("process {pid}: {error}"))?;
        Ok(tasks.flatten().map(|task| task.path()).collect())
    }

    fn of(&self, pid: u32, file: &str) -> Result<String, String> {
        self.read(&format!("proc/{pid}/{file}"))
    }

    /// Checks that every mapping is locked, except those of the kernel or of a driver that are
    /// never swapped. The evidence is the memory in locked mappings: `VmLck` would count address
    /// space without memory.
    pub(super) fn locked(&self, pids: &[u32]) -> Found {
        let one = |&pid: &u32| {
            let Mappings { unlocked, locked_kib } = Mappings::of(&self.of(pid, "smaps")?);
            if let Some(first) = unlocked.first() {
                return Err(format!(
                    "process {pid}: {} mappings not locked: LimitMEMLOCK=infinity in its unit, or \
                     root; one is {first}",
                    unlocked.len()
                ));
            }
            Ok(format!("{pid} has {locked_kib} KiB locked"))
        };
        let each = pids.iter().map(one).collect::<Result<Vec<_>, _>>()?;
        Ok(each.join(", "))
    }

    pub(super) fn lock_limit(&self, pids: &[u32]) -> Found {
        for &pid in pids {
            match field(&self.of(pid, "limits")?, "Max locked memory") {
                Some("unlimited") => {}
                other => {
                    let other = other.unwrap_or("?");
                    let remedy = "LimitMEMLOCK=infinity in its unit, or root";
                    return Err(format!("process {pid} may lock {other} bytes: {remedy}").into());
                }
            }
        }
        Ok("any amount of memory may be locked".into())
    }

    /// Checks that the server's thread that allocates memory ahead of need may use the kernel's
    /// reserve.
    pub(super) fn keeper(&self, pids: &[u32], name: &str, memory: Option<Memory>) -> Found {
        const FIFO_OR_ROUND_ROBIN: [u64; 2] = [1, 2];
        let server = *pids.first().ok_or_else(|| "no server".to_owned())?;
        let keeper = self.tasks(server)?.into_iter().find(|task| {
            fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)
        });
        let Some(keeper) = keeper else {
            return Err(format!("process {server} has no thread {name}").into());
        };
        let policy = task_field(&keeper, 41);
        if !policy.is_some_and(|policy| FIFO_OR_ROUND_ROBIN.contains(&policy)) {
            return Err(
                "the thread that finds memory is not of real time, and gets none when there is \
                 little: LimitRTPRIO=1 in its unit, or root"
                    .to_owned()
                    .into(),
            );
        }
        let found = "memory is found ahead of need by a thread of real time";
        Ok(memory.map_or_else(
            || found.to_owned(),
            |Memory { ready, limit }| {
                let limit = match limit {
                    0 => "no limit".to_owned(),
                    limit => format!("the limit is {} KiB", limit >> 10),
                };
                format!("{found}; {} KiB are ready, {limit}", ready >> 10)
            },
        ))
    }

    pub(super) fn oom(&self, pids: &[u32]) -> Found {
        for &pid in pids {
            match self.of(pid, "oom_score_adj")?.trim() {
                "-1000" => {}
                other => {
                    let other = format!("process {pid} has oom_score_adj {other}, not -1000");
                    let remedy = "OOMScoreAdjust=-1000 in its unit, or root";
                    return Err(format!("{other}: it may be killed: {remedy}").into());
                }
            }
        }
        Ok("the kernel does not kill it for memory".into())
    }

    /// Checks that no core dump is written. With a limit below one page the kernel writes none to a
    /// file. With a limit of one byte it writes none to a pipe handler, because it takes such a
    /// process for the handler itself. A limit of 0 does not stop a pipe handler.
    pub(super) fn cores(&self, pids: &[u32]) -> Found {
        // A kernel without core dumps has no such file.
        let pattern = self.read("proc/sys/kernel/core_pattern").unwrap_or_default();
        let pattern = pattern.trim();
        for &pid in pids {
            match (field(&self.of(pid, "limits")?, "Max core file size"), pattern.as_bytes()) {
                (Some("0" | "1"), [b'@', ..]) => {
                    return Err(Not::Seen(format!("the kernel sends cores to {pattern}")));
                }
                (Some("0"), [b'|', ..]) => {
                    return Err(format!(
                        "process {pid} has a limit of 0, not 1, which does not keep its core from {pattern}"
                    )
                    .into());
                }
                (Some("0" | "1"), _) => {}
                (other, _) => {
                    let other = other.unwrap_or("?");
                    return Err(format!("process {pid} may dump {other} bytes").into());
                }
            }
        }
        Ok("none is written, to no file and no program".into())
    }

    /// Checks that swap is turned off in each process's cgroup or in one above it, and that none of
    /// these cgroups has a memory limit.
    pub(super) fn cgroup(&self, pids: &[u32]) -> Found {
        let base = Path::new("sys/fs/cgroup");
        for &pid in pids {
            let text = self.of(pid, "cgroup")?;
            let Some(path) = text.lines().find_map(|line| line.strip_prefix("0::")) else {
                let no =
                    "no unified cgroup hierarchy: nothing says that it is not swapped or limited";
                return Err(no.to_owned().into());
            };
            let leaf = Path::new(path.trim_start_matches('/'));
            if leaf.starts_with("user.slice") {
                return Err(format!(
                    "cgroup {path} is a user's: systemd may freeze it, when the host sleeps for \
                     example, and with it the server: start platen as a service of the system \
                     (docs/memory.md has a unit)"
                )
                .into());
            }
            let mut swapless = false;
            for level in leaf.ancestors() {
                let value = |file: &str| {
                    let text = fs::read_to_string(self.root.join(base).join(level).join(file)).ok();
                    text.map(|text| text.trim().to_owned())
                };
                let name = format!("/{}", level.display());
                match value("memory.swap.max") {
                    Some(swap) => swapless |= swap == "0",
                    // The root cgroup has no such files, nor has a cgroup without the memory
                    // controller.
                    None if level == leaf => {
                        let no = "is the root, or has no memory controller";
                        return Err(format!("cgroup {path} {no}: {}", remedy(path)).into());
                    }
                    None => {}
                }
                for file in ["memory.max", "memory.high"] {
                    if let Some(limit) = value(file).filter(|limit| limit != "max") {
                        return Err(format!(
                            "cgroup {name}, in which process {pid} is, has {file} {limit}: it should \
                             be max"
                        )
                        .into());
                    }
                }
            }
            if !swapless {
                let should = "memory.swap.max should be 0";
                return Err(format!("cgroup {path}: {should}: {}", remedy(path)).into());
            }
        }
        Ok("a cgroup without swap, and no limit in it or above it".into())
    }

    pub(super) fn mounts(&self, pids: &[u32]) -> Found {
        let namespace = |pid: u32| {
            fs::read_link(self.root.join(format!("proc/{pid}/ns/mnt")))
                .map_err(|error| format!("process {pid}: {error}"))
        };
        let first = namespace(1).map_err(|why| Not::Seen(format!("cannot tell: {why}")))?;
        for &pid in pids {
            if namespace(pid)? == first {
                let why = "has the mounts of everybody, and a disk of its own might be one: serve it as root";
                return Err(format!("process {pid} {why}").into());
            }
        }
        Ok("its own".into())
    }
}

/// A release build does not check for allocations.
pub(super) fn allocations() -> Found {
    let how = "a debug build ends with a message when a thread that does requests asks for memory";
    Err(Not::Seen(how.to_owned()))
}

/// Other processes cannot observe what a thread writes, and when.
pub(super) fn output_threads() -> Found {
    let how = "the control socket, Prometheus and what is printed have threads of their own";
    Err(Not::Seen(how.to_owned()))
}

pub(super) fn task_flags(task: &Path) -> Option<u64> {
    task_field(task, 9)
}

/// A number in a thread's `stat`, by its field number in proc(5), from 1.
fn task_field(task: &Path, place: usize) -> Option<u64> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    // The second field is the name in brackets, which may contain anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(place - 3)?.parse().ok()
}

/// The flags that an I/O flusher has and another thread does not.
pub(super) fn flusher_bits() -> io::Result<u64> {
    let probe = || {
        let own = || task_flags(Path::new("/proc/thread-self")).ok_or(io::ErrorKind::InvalidData);
        use rustix::process::configure_io_flusher_behavior as flusher;
        flusher(false)?;
        let without = own()?;
        flusher(true)?;
        Ok(own()? & !without)
    };
    // In a thread of its own: this thread's setting must not change.
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

/// The facts of an `smaps` file that `memory-locked` needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Mappings {
    /// The first line of each mapping that is neither locked nor of a kind that cannot be.
    pub(super) unlocked: Vec<String>,
    /// Resident memory of the locked mappings.
    pub(super) locked_kib: u64,
}

impl Mappings {
    pub(super) fn of(smaps: &str) -> Self {
        let mut found = Self::default();
        let (mut head, mut resident) = ("", 0);
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if !first.ends_with(':') {
                (head, resident) = (line, 0);
            } else if first == "Rss:" {
                resident = words.next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
            } else if first == "VmFlags:" {
                let flags: Vec<&str> = words.collect();
                if flags.contains(&"lo") {
                    found.locked_kib += resident;
                } else if !cannot_be_locked(head, &flags) {
                    found.unlocked.push(head.to_owned());
                }
            }
        }
        found
    }
}

/// Whether the mapping with this first line and these flags is never swapped out although it is not
/// locked.
fn cannot_be_locked(head: &str, flags: &[&str]) -> bool {
    let has = |flag| flags.contains(&flag);
    // Pages without struct page (pf), of a device (io), or the kernel's own mappings (named in
    // brackets, as are heap and stack, which do count).
    let name = head.split_whitespace().nth(5).unwrap_or_default();
    let kernels = matches!(name, "[vvar]" | "[vdso]" | "[vsyscall]" | "[vvar_vclock]");
    // A driver's memory is not swapped, and mlock skips it.
    let drivers = name.starts_with("/dev/ublkc") || name.starts_with("anon_inode:");
    // An inaccessible mapping has no pages: a guard page, or reserved address space.
    let reserve = !(has("rd") || has("wr") || has("ex"));
    has("pf") || has("io") || kernels || drivers || reserve
}

/// How to give the cgroup no swap and no limit; its name tells who manages it.
pub(super) fn remedy(path: &str) -> &'static str {
    let last = path.rsplit('/').next().unwrap_or_default();
    match last.rsplit_once('.') {
        Some((_, "service")) => {
            "MemorySwapMax=0 and MemoryMax=infinity in its unit (docs/memory.md has one)"
        }
        Some((_, "scope" | "slice")) => {
            "start platen as a service with MemorySwapMax=0, `systemd-run -p MemorySwapMax=0 platen ...` for one"
        }
        _ if path == "/" => "let platen make a cgroup of its own (root, cgroup v2, writable)",
        _ => "echo 0 > memory.swap.max and echo max > memory.max there, or start platen elsewhere",
    }
}

/// The value after `name` at the beginning of a line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())
}
