//! Precautions of a process that serves swap, taken before it has a second thread.
//!
//! A process that serves swap must not wait for swap. A server that allocates memory may have to
//! swap a page out to itself. A server whose own pages are swapped out reads them in from itself. A
//! server that the OOM killer ends loses its contents. Each precaution prevents one of these.

mod cgroup;
mod priority;
mod signals;
mod stack;
mod untaken;

use std::fs;
use std::io;
use std::path::Path;

use rustix::mm::{mlockall, MlockAllFlags};
use rustix::process::{
    configure_io_flusher_behavior, set_dumpable_behavior, setrlimit, DumpableBehavior, Resource,
    Rlimit, Signal,
};

pub use self::cgroup::leave_cgroup;
pub use self::priority::{prefer, prefer_alone, prefer_this};
pub use self::signals::{
    end_signals, heed_children, ignore_faults, ignore_signals, ignore_size_signal, ignore_terminal,
    resume_signal, unblock_end_signals,
};
pub use self::untaken::Untaken;

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
    attempt("make a cgroup without swap", cgroup::own_cgroup(Path::new("/sys/fs/cgroup")));
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
    // glibc would give another thread a heap of its own, of which 132 KiB are locked at once.
    crate::sys::one_heap();
    // Without it this process takes 80 KiB more, and is as safe.
    let _ = stack::shorten();
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

/// Closes all descriptors but 0 to 2, in a process that has just started. Otherwise it would hold
/// its supervisor's sockets, lock of the name, store and backing device as long as it lives.
///
/// # Errors
///
/// The kernel's error.
pub fn close_inherited() -> Result<(), Untaken> {
    let action = "close what is not its own";
    crate::sys::close_inherited().map_err(|source| Untaken { action, source })
}

/// Undoes precautions that a trainer inherits from its supervisor. A trainer must not have them,
/// since it needs memory and time, and no process depends on it. Call this first, with one thread
/// and no descriptors of its own.
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
    // Only a privileged process can be a flusher, so a failure means that this one is none.
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

/// Allocates and frees memory, so that this process already owns what it will need: `heap` bytes,
/// and the stacks of `threads` threads and of threads with stacks of `small` bytes. A stand-by
/// server does this while there is memory. When it has to start there may be none, because what
/// would free some waits for it to start.
///
/// glibc retains the heap only with `MALLOC_ARENA_MAX=1`, `MALLOC_MMAP_MAX_=0` and
/// `MALLOC_TRIM_THRESHOLD_` above `heap` ([`KEEPING`]); it caches stacks up to 40 MiB.
///
/// # Errors
///
/// No thread can be started.
pub fn warm(heap: usize, threads: usize, small: &[usize]) -> io::Result<()> {
    // The memory is allocated in pieces, as in real use. Each piece is written to, so that it has
    // memory even without mlockall.
    const PIECE: usize = 64 << 10;
    let pieces: Vec<Vec<u8>> = (0..heap.div_ceil(PIECE)).map(|_| vec![0x5a; PIECE]).collect();
    drop(std::hint::black_box(pieces));
    let together = std::sync::Arc::new(std::sync::Barrier::new(threads + small.len() + 1));
    let usual = std::iter::repeat_with(std::thread::Builder::new).take(threads);
    let small = small.iter().map(|&bytes| std::thread::Builder::new().stack_size(bytes));
    let started: Vec<_> = usual
        .chain(small)
        .map(|thread| {
            let together = std::sync::Arc::clone(&together);
            thread.spawn(move || together.wait())
        })
        .collect();
    if let Some(error) = started.iter().find_map(|started| started.as_ref().err()) {
        // The waiting threads end with the process, which this error ends.
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
