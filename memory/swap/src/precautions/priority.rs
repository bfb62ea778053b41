//! Real-time priority for threads on which all others wait when memory is short.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use super::untaken::Untaken;

/// Gives real-time priority to the threads of this process that are called `name`, or `name` and a
/// number (`fetch-3`). The kernel lets real-time threads use half of its emergency reserve of
/// memory. The priority is for threads that allocate memory for swapped-out pages, and for threads
/// that read such pages from a disk, whose requests need some memory. If they waited for memory
/// like all others, nothing would be swapped out, and all would wait for ever.
///
/// The caller must be the process's first thread and have started the threads, or know that they
/// run.
///
/// # Errors
///
/// The kernel's error; no thread has the name; or a thread has not run within 10 s, so that its
/// name is unknown.
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

/// As [`prefer`], for this thread and those that it starts from now on.
///
/// # Errors
///
/// The kernel's error.
pub fn prefer_this() -> Result<(), Untaken> {
    crate::sys::real_time(0, true).map_err(|source| Untaken { action: "prefer a thread", source })
}

/// As [`prefer`], for this thread, and not for threads and processes that it starts. For the
/// supervisor and a stand-by server: when the server has died, even the few bytes of "go" need
/// kernel memory, and nothing else frees any.
///
/// # Errors
///
/// The kernel's error.
pub fn prefer_alone() -> Result<(), Untaken> {
    crate::sys::real_time(0, false).map_err(|source| Untaken { action: "prefer a thread", source })
}

fn is_one_of(comm: &str, name: &str) -> bool {
    let number = comm.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    comm == name || number.is_some_and(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// One test after the other: [`prefer`] waits for a thread of any of them that has no name yet.
    fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
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
        let _turn = turn();
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
        let _turn = turn();
        // On a busy machine a thread of another test may not begin in 10 s.
        let attempts = std::iter::repeat_with(|| prefer("renamed").unwrap_err()).take(30);
        let begun = |error: &Untaken| !error.source.to_string().contains("have not begun");
        let error = attempts.into_iter().find(begun).expect("all threads have begun");
        assert!(error.source.to_string().contains("no thread is called renamed"), "{error:?}");
    }

    #[test]
    fn a_thread_that_has_not_started_is_awaited() {
        let _turn = turn();
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
}
