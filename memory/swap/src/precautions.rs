//! Precautions of a process that serves swap, taken before it has a second thread.
//!
//! A process that serves swap must not wait for swap. A server that allocates memory may have to
//! swap a page out to itself. A server whose own pages are swapped out reads them in from itself. A
//! server that the OOM killer ends loses its contents. Each precaution prevents one of these.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mm::{mlockall, MlockAllFlags};
use rustix::process::{
    configure_io_flusher_behavior, set_dumpable_behavior, setrlimit, DumpableBehavior, Resource,
    Rlimit, Signal,
};

/// A precaution that could not be taken. The caller decides whether to serve without it; the check
/// shows it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}")]
pub struct Untaken {
    /// The operation that failed.
    pub action: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

/// Takes the precautions that children inherit. The supervisor calls this while it has one thread.
/// Returns those that failed.
///
/// * `PR_SET_IO_FLUSHER`: an allocation in a thread never waits for pages to be written out.
/// * limits: memory may be locked, cores are not dumped.
/// * `oom_score_adj` -1000: the OOM killer spares the process.
/// * a mount namespace of its own: it pins no other process's mounts, and no unmount waits for it.
/// * a cgroup of its own without swap and without a limit, unless it has one already or may not
///   make one.
pub fn inherited() -> Vec<Untaken> {
    let mut untaken = Vec::new();
    let mut attempt = |action, result: io::Result<()>| {
        if let Err(source) = result {
            untaken.push(Untaken { action, source });
        }
    };
    attempt("become an I/O flusher", configure_io_flusher_behavior(true).map_err(Into::into));
    let unlimited = Rlimit { current: None, maximum: None };
    attempt("lift the limit on locked memory", {
        setrlimit(Resource::Memlock, unlimited).map_err(Into::into)
    });
    // A limit below a page writes no core to a file. A pipe handler gets cores whatever the limit
    // is, except 1, by which the kernel recognizes a crash of the handler itself. Unlike the
    // setting that `own` makes, the limit can be read from outside.
    let none = Rlimit { current: Some(1), maximum: Some(1) };
    attempt("turn core dumps off", setrlimit(Resource::Core, none).map_err(Into::into));
    attempt("set oom_score_adj", fs::write("/proc/self/oom_score_adj", "-1000"));
    attempt("make a mount namespace", own_mounts());
    attempt("make a cgroup without swap", own_cgroup(Path::new("/sys/fs/cgroup")));
    untaken
}

/// Takes the precautions that each program takes for itself: locks all its memory, present and
/// future, excludes it from core dumps, and keeps the host from hibernating while the process
/// lives. Call it before there are threads, once the program's own large allocations are decided.
pub fn own() -> Vec<Untaken> {
    let mut untaken = Vec::new();
    let mut attempt = |action, result: rustix::io::Result<()>| {
        if let Err(error) = result {
            untaken.push(Untaken { action, source: error.into() });
        }
    };
    attempt("turn core dumps off", set_dumpable_behavior(DumpableBehavior::NotDumpable));
    attempt("lock memory", mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE));
    match crate::sys::secret_memory() {
        // Open as long as this process lives. Each process has its own, because another one may
        // exit first.
        Ok(secret) => std::mem::forget(secret),
        Err(source) if can_hibernate(Path::new("/sys/power/disk")) => {
            let action = "keep the host from hibernating (boot it with nohibernate)";
            untaken.push(Untaken { action, source });
        }
        Err(_) => {}
    }
    untaken
}

/// Whether the kernel can hibernate, by `/sys/power/disk`. To hibernate, the kernel freezes
/// processes and then swaps pages out: it would wait for a frozen swap server.
pub(crate) fn can_hibernate(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|ways| !ways.contains("[disabled]"))
}

/// Gives the threads of this process that are called `name`, or `name` and a number (`fetch-3`),
/// real-time priority: the kernel lets real-time threads use half of its emergency reserve of
/// memory. It is for threads that allocate memory for swapped-out pages, and for those that read
/// such pages from a disk, whose requests need some. If they waited for memory like all others,
/// nothing would be swapped out, and all would wait for ever.
///
/// The caller must be the process's first thread and have started the threads, or know that they
/// run.
///
/// # Errors
///
/// The kernel's; no thread has the name; or one has not run within 10 s, so that its name is
/// unknown.
pub fn prefer(name: &str) -> Result<(), Untaken> {
    // A thread sets its name when it first runs, which may take a while if memory is short. Until
    // then it has the name of the first thread, which started it.
    let deadline = Instant::now() + Duration::from_secs(10);
    let attempt = || loop {
        let first = fs::read_to_string("/proc/self/comm")?;
        let (mut nameless, mut found) = (0, 0);
        for task in fs::read_dir("/proc/self/task")? {
            let task = task?;
            // The thread may have exited.
            let Ok(comm) = fs::read_to_string(task.path().join("comm")) else { continue };
            let number = task.file_name().to_string_lossy().parse::<i32>();
            if let (true, Ok(number)) = (is_one_of(comm.trim_end(), name), &number) {
                crate::sys::real_time(*number, true)?;
                found += 1;
            }
            let own = number.is_ok_and(|number| number.unsigned_abs() == std::process::id());
            nameless += u32::from(comm == first && !own);
        }
        if nameless == 0 && found > 0 {
            return Ok(());
        }
        if nameless == 0 {
            return Err(io::Error::other(format!("no thread is called {name}")));
        }
        if Instant::now() >= deadline {
            return Err(io::Error::other(format!("{nameless} threads have not begun in 10 s")));
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    attempt().map_err(|source| Untaken { action: "prefer a thread", source })
}

fn is_one_of(comm: &str, name: &str) -> bool {
    let number = comm.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    comm == name || number.is_some_and(is_number)
}

/// As [`prefer`], for this thread and those that it starts from now on.
///
/// # Errors
///
/// The kernel's.
pub fn prefer_this() -> Result<(), Untaken> {
    crate::sys::real_time(0, true).map_err(|source| Untaken { action: "prefer a thread", source })
}

/// As [`prefer`], for this thread, and not for threads and processes that it starts. For the
/// supervisor and a stand-by server: when the server has died, even the few bytes of "go" need
/// kernel memory, and nothing else frees any.
///
/// # Errors
///
/// The kernel's.
pub fn prefer_alone() -> Result<(), Untaken> {
    crate::sys::real_time(0, false).map_err(|source| Untaken { action: "prefer a thread", source })
}

/// Ignores the signals with which a terminal or a service manager ends all processes at once: only
/// the supervisor knows the order. For servers until they get a handler of their own, and for
/// helpers.
///
/// # Errors
///
/// The kernel's.
pub fn ignore_signals() -> Result<(), Untaken> {
    crate::sys::ignore_signals().map_err(|source| Untaken { action: "ignore signals", source })
}

/// Ignores the signals with which a terminal stops or ends its processes (Ctrl-Z, Ctrl-\\, and
/// background output under `stty tostop`), also in processes started from here. The terminal sends
/// them to all processes of a device, and the shell that would have to continue them may be swapped
/// out to that very device.
///
/// # Errors
///
/// The kernel's.
pub fn ignore_terminal() -> Result<(), Untaken> {
    let action = "ignore the terminal's signals";
    crate::sys::ignore_terminal().map_err(|source| Untaken { action, source })
}

/// Blocks SIGUSR1 in this thread and those that it starts from now on. Returns a descriptor that
/// becomes readable when the signal arrives.
///
/// # Errors
///
/// The kernel's.
pub fn resume_signal() -> io::Result<OwnedFd> {
    crate::sys::signal_descriptor(&[libc::SIGUSR1])
}

/// Blocks SIGINT, SIGTERM and SIGHUP in this thread, in threads that it starts later, and in child
/// processes. Returns a descriptor that is readable when one is pending. A pending signal survives
/// `execve`.
///
/// # Errors
///
/// The kernel's.
pub fn end_signals() -> io::Result<OwnedFd> {
    crate::sys::signal_descriptor(&crate::sys::END)
}

/// Unblocks, in this thread and those that it starts later, the signals that the parent process has
/// blocked by [`end_signals`].
///
/// # Errors
///
/// The kernel's.
pub fn unblock_end_signals() -> Result<(), Untaken> {
    let action = "unblock signals";
    crate::sys::unblock(&crate::sys::END).map_err(|source| Untaken { action, source })
}

/// Closes all descriptors but 0 to 2, for a process that has just started. Otherwise it would hold
/// its supervisor's sockets, lock of the name, store and backing device as long as it lives.
///
/// # Errors
///
/// The kernel's.
pub fn close_inherited() -> Result<(), Untaken> {
    let action = "close what is not its own";
    crate::sys::close_inherited().map_err(|source| Untaken { action, source })
}

/// Makes a file that would exceed this process's file size limit (`ulimit -f`, `LimitFSIZE=`) an
/// error, EFBIG, instead of the end of the process: the store is such a file, and the backing
/// device may be one. Processes started from here inherit this.
///
/// # Errors
///
/// The kernel's.
pub fn ignore_size_signal() -> Result<(), Untaken> {
    let action = "ignore the signal for files that are too long";
    crate::sys::ignore_size_signal().map_err(|source| Untaken { action, source })
}

/// Undoes what a trainer inherits from its supervisor and must not have, since it needs memory and
/// time and no process depends on it. Call it first, with one thread and no descriptors of its own.
///
/// * no I/O flusher, nice 19, `oom_score_adj` 1000: it waits for memory, and is the first to be
///   killed.
/// * limits of `memory` bytes of address space and `cpu` seconds of CPU time; it ends with the
///   supervisor.
/// * all descriptors but 0 to 2 are closed: it does not need store, buffers and backing device.
pub fn apart(memory: u64, cpu: u64) -> Vec<Untaken> {
    let mut untaken = Vec::new();
    let mut attempt = |action, result: io::Result<()>| {
        if let Err(source) = result {
            untaken.push(Untaken { action, source });
        }
    };
    attempt("close what is not its own", crate::sys::close_inherited());
    let death = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    attempt("end with the supervisor", death.map_err(Into::into));
    // Only a process with the privilege can be a flusher, so a failure means that this is none.
    let _ = configure_io_flusher_behavior(false);
    attempt("be nice", rustix::process::setpriority_process(None, 19).map_err(Into::into));
    attempt("set oom_score_adj", fs::write("/proc/self/oom_score_adj", "1000"));
    for (action, resource, limit) in [
        ("limit its memory", Resource::As, memory),
        ("limit its CPU", Resource::Cpu, cpu),
        ("turn core dumps off", Resource::Core, 0),
    ] {
        let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
        attempt(action, setrlimit(resource, limit).map_err(Into::into));
    }
    untaken
}

fn own_mounts() -> io::Result<()> {
    use rustix::mount::{mount_change, MountPropagationFlags};
    // Mounts and unmounts in the parent namespace still propagate to this one; those here do not
    // propagate.
    crate::sys::unshare_mounts()?;
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", flags)?;
    Ok(())
}

/// Moves this process to a cgroup of its own below `root`, unless it has one without swap. A cgroup
/// of a systemd unit is not touched: the unit configures it.
fn own_cgroup(root: &Path) -> io::Result<()> {
    let current = fs::read_to_string("/proc/self/cgroup")?;
    let Some(path) = current.lines().find_map(|line| line.strip_prefix("0::")) else {
        return Err(io::Error::other("there is no unified cgroup hierarchy"));
    };
    let current = root.join(path.trim_start_matches('/'));
    if fs::read_to_string(current.join("memory.swap.max")).is_ok_and(|max| max.trim() == "0") {
        return Ok(());
    }
    if path != "/" {
        return Err(io::Error::other(format!(
            "cgroup {path} is somebody's, and has swap: start platen as a service whose unit has MemorySwapMax=0 (docs/memory.md has one), or by `systemd-run -p MemorySwapMax=0`"
        )));
    }
    // The controller may be on already. If it is refused, the files below do not exist.
    let _ = set(&root.join("cgroup.subtree_control"), "+memory");
    let own = root.join(format!("platen-{}", std::process::id()));
    fs::create_dir_all(&own)?;
    let made =
        set(&own.join("memory.swap.max"), "0").and_then(|()| set(&own.join("cgroup.procs"), "0"));
    if made.is_err() {
        // It is empty.
        let _ = fs::remove_dir(&own);
    }
    made
}

/// Removes the cgroup that [`inherited`] made; this process moves to the root cgroup. Call it at
/// the end.
pub fn leave_cgroup() {
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(format!("platen-{}", std::process::id()));
    if own.exists() && set(&root.join("cgroup.procs"), "0").is_ok() {
        // Fails if another process is still in it; then it stays.
        let _ = fs::remove_dir(own);
    }
}

/// Writes to an existing file of the kernel. Around cgroup v1 hierarchies there is an ordinary
/// folder, in which creating a file would succeed without effect.
fn set(file: &Path, value: &str) -> io::Result<()> {
    io::Write::write_all(&mut fs::File::options().write(true).open(file)?, value.as_bytes())
}

/// Allocates and frees memory, so that this process already owns what it will need: `heap` bytes,
/// and the stacks of `threads` threads. A stand-by server does this while there is memory. When it
/// has to start there may be none, because what would free some waits for it to start.
///
/// glibc retains the heap only with `MALLOC_ARENA_MAX=1`, `MALLOC_MMAP_MAX_=0` and
/// `MALLOC_TRIM_THRESHOLD_` above `heap` ([`KEEPING`]); it caches stacks up to 40 MiB.
///
/// # Errors
///
/// No thread can be started.
pub fn warm(heap: usize, threads: usize) -> io::Result<()> {
    // In pieces, as in real use. Each is written to, so that it has memory even without mlockall.
    const PIECE: usize = 64 << 10;
    let pieces: Vec<Vec<u8>> = (0..heap.div_ceil(PIECE)).map(|_| vec![0x5a; PIECE]).collect();
    drop(std::hint::black_box(pieces));
    let together = std::sync::Arc::new(std::sync::Barrier::new(threads + 1));
    let started: Vec<_> = (0..threads)
        .map(|_| {
            let together = std::sync::Arc::clone(&together);
            std::thread::Builder::new().spawn(move || together.wait())
        })
        .collect();
    if let Some(error) = started.iter().find_map(|started| started.as_ref().err()) {
        // The threads that wait end with the process, which this error ends.
        return Err(io::Error::new(error.kind(), error.to_string()));
    }
    together.wait();
    for thread in started.into_iter().flatten() {
        // The threads cannot panic.
        let _ = thread.join();
    }
    Ok(())
}

/// The environment that a process must be started with to [`warm`] itself.
pub const KEEPING: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_MAX_", "0"),
    ("MALLOC_TRIM_THRESHOLD_", "1073741824"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// An ordinary folder, as around cgroup v1 hierarchies.
    #[test]
    fn no_cgroup_is_made_of_a_folder() {
        let root = tempfile::tempdir().unwrap();
        let made = own_cgroup(root.path());
        assert!(made.is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    /// The scheduling policy of a thread: the 41st field of its `stat`.
    fn policy(thread: i32) -> i32 {
        let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        let fields = stat.rsplit_once(')').unwrap().1;
        fields.split_whitespace().nth(38).unwrap().parse().unwrap()
    }

    #[test]
    fn a_thread_is_preferred_alone_or_with_those_that_it_starts() {
        let own = || policy(rustix::thread::gettid().as_raw_nonzero().get());
        let chosen = |prefer: fn() -> Result<(), Untaken>| {
            let thread = std::thread::spawn(move || {
                prefer().map(|()| (own(), std::thread::spawn(own).join().unwrap()))
            });
            thread.join().unwrap()
        };
        match (chosen(prefer_alone), chosen(prefer_this)) {
            (Ok((alone, started)), Ok(with)) => {
                assert_eq!((alone & 0xff, started), (libc::SCHED_RR, libc::SCHED_OTHER));
                assert_eq!(with, (libc::SCHED_RR, libc::SCHED_RR));
            }
            (Err(untaken), _) | (_, Err(untaken)) => {
                println!("skipped: {untaken}: {}", untaken.source);
            }
        }
    }

    #[test]
    fn threads_that_are_numbered_are_preferred_as_well() {
        let names = ["fetch-0", "fetch-3", "fetch", "fetcher", "fetch-", "fetch-x", "other"];
        let (say, said) = channel();
        let threads: Vec<_> = names
            .iter()
            .map(|name| {
                let (end, ended) = channel::<()>();
                let say = say.clone();
                let thread = std::thread::Builder::new().name((*name).into()).spawn(move || {
                    say.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                    let _ = ended.recv();
                });
                (said.recv().unwrap(), end, thread.unwrap())
            })
            .collect();
        let before: Vec<i32> = threads.iter().map(|(id, ..)| policy(*id)).collect();
        let preferred = prefer("fetch");
        let after: Vec<i32> = threads.iter().map(|(id, ..)| policy(*id)).collect();
        for (_, end, thread) in threads {
            drop(end);
            thread.join().unwrap();
        }
        if let Err(untaken) = preferred {
            println!("skipped: {untaken}: {}", untaken.source);
            return;
        }
        let round_robin = libc::SCHED_RR;
        for ((name, before), after) in names.iter().zip(before).zip(after) {
            let expected = match *name {
                "fetch" | "fetch-0" | "fetch-3" => round_robin,
                _ => before,
            };
            assert_eq!(after, expected, "{name}");
        }
    }

    #[test]
    fn an_unknown_thread_name_is_an_error_that_names_it() {
        let error = prefer("renamed").unwrap_err();
        assert!(error.source.to_string().contains("no thread is called renamed"), "{error:?}");
    }

    #[test]
    fn a_thread_that_has_not_started_is_awaited() {
        let first = fs::read_to_string("/proc/self/comm").unwrap();
        let (say, said) = channel();
        let (end, ended) = channel::<()>();
        let thread = std::thread::spawn(move || {
            let name = |name: &str| {
                let name = std::ffi::CString::new(name).unwrap();
                rustix::thread::set_name(&name).unwrap();
            };
            // As a thread is called that has not run yet.
            name(first.trim_end());
            say.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            name("late-0");
            let _ = ended.recv();
        });
        let id = said.recv().unwrap();
        let preferred = prefer("late");
        let after = policy(id);
        drop(end);
        thread.join().unwrap();
        match preferred {
            Ok(()) => assert_eq!(after, libc::SCHED_RR),
            Err(untaken) => println!("skipped: {untaken}: {}", untaken.source),
        }
    }

    #[test]
    fn terminal_signals_reach_no_child_process() {
        ignore_terminal().unwrap();
        let status = std::process::Command::new("cat").arg("/proc/self/status").output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        for signal in [Signal::QUIT, Signal::TSTP, Signal::TTIN, Signal::TTOU] {
            assert!(ignored & 1 << (signal.as_raw() - 1) != 0, "{signal:?} of {ignored:x}");
        }
    }
}
