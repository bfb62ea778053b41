//! Reads and writes that a thread can be killed in.
//!
//! A thread in `pread` on a disk that does not answer cannot be killed, and until the disk answers
//! its process is not gone: its successor would wait for the store's lock, for the kernel's disk,
//! for the supervisor to notice. A thread that waits for a completion of io_uring sleeps in a way
//! that ends with a signal, and what it had asked for is the kernel's. (Where the kernel cannot
//! submit without waiting, as for a device all of whose requests are under way, it has a worker
//! wait that belongs to the process; then it is as with `pread`.)
#![expect(unsafe_code, reason = "entries name memory by its address")]

use std::io;
use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use io_uring::{opcode, squeue, types, IoUring};
use rustix::io::Errno;

/// Who waits for a disk at a time: those who fetch, the policy, and one by the way.
const RINGS: usize = 6;

/// How soon to try again what the kernel has no memory for.
const AGAIN: Duration = Duration::from_millis(1);

/// Some rings, one for whoever comes.
pub(crate) struct Rings(Box<[Mutex<Option<IoUring>>]>);

impl Rings {
    /// Rings, if the kernel has any for us.
    pub(crate) fn new() -> Option<Self> {
        let ring = |_| Some(Mutex::new(Some(IoUring::new(2).ok()?)));
        (0..RINGS).map(ring).collect::<Option<_>>().map(Self)
    }

    fn any(&self) -> MutexGuard<'_, Option<IoUring>> {
        let free = self.0.iter().find_map(|ring| ring.try_lock().ok());
        // Nothing is left half done by a panic while it is held.
        free.unwrap_or_else(|| self.0[0].lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As `pread`; `None` if rings do not do it.
    pub(crate) fn read(&self, fd: RawFd, out: &mut [u8], at: u64) -> Option<io::Result<usize>> {
        let len = u32::try_from(out.len()).ok()?;
        let entry = opcode::Read::new(types::Fd(fd), out.as_mut_ptr(), len).offset(at).build();
        // SAFETY: `out` is borrowed until it returns.
        unsafe { self.run(&entry) }
    }

    /// As `pwrite`; `None` if rings do not do it.
    pub(crate) fn write(&self, fd: RawFd, bytes: &[u8], at: u64) -> Option<io::Result<usize>> {
        let len = u32::try_from(bytes.len()).ok()?;
        let entry = opcode::Write::new(types::Fd(fd), bytes.as_ptr(), len).offset(at).build();
        // SAFETY: `bytes` is borrowed until it returns.
        unsafe { self.run(&entry) }
    }

    /// Has the kernel do it, and waits until it has.
    ///
    /// # Safety
    ///
    /// The memory that `entry` names stays what it is until this returns.
    unsafe fn run(&self, entry: &squeue::Entry) -> Option<io::Result<usize>> {
        let mut slot = self.any();
        let ring = slot.as_mut()?;
        // SAFETY: by the caller's promise the memory stays until we return, which is when the
        // kernel is done with it, or has never had it and the ring is gone.
        if unsafe { ring.submission().push(entry) }.is_err() {
            return None;
        }
        loop {
            match ring.submit() {
                Ok(0) => thread::sleep(AGAIN),
                Ok(_) => break,
                Err(error) if passes(&error) => thread::sleep(AGAIN),
                Err(_) => {
                    // What it still has to submit goes with it.
                    *slot = None;
                    return None;
                }
            }
        }
        loop {
            if let Some(done) = ring.completion().next() {
                let done = done.result();
                return Some(
                    usize::try_from(done).map_err(|_| io::Error::from_raw_os_error(-done)),
                );
            }
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
                // The memory is the kernel's until it says so.
                Err(_) => thread::sleep(AGAIN),
            }
        }
    }
}

fn passes(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::INTR | Errno::AGAIN | Errno::BUSY | Errno::NOMEM))
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rings").field("number", &self.0.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn threads_beyond_the_rings_get_their_own_bytes() {
        let Some(rings) = Rings::new() else {
            println!("skipped: this kernel has no io_uring for us");
            return;
        };
        let mut file = tempfile();
        let bytes: Vec<u8> = (0..64 * 4096_usize).map(|at| (at / 4096).to_le_bytes()[0]).collect();
        file.write_all(&bytes).unwrap();
        let fd = file.as_raw_fd();
        thread::scope(|scope| {
            for number in 0..2 * u8::try_from(RINGS).unwrap() {
                let rings = &rings;
                scope.spawn(move || {
                    let mut out = [0xff; 4096];
                    for _ in 0..200 {
                        let at = u64::from(number) * 4096;
                        assert_eq!(rings.read(fd, &mut out, at).unwrap().unwrap(), 4096);
                        assert!(out.iter().all(|&byte| byte == number));
                        let at = u64::from(32 + number) * 4096;
                        assert_eq!(rings.write(fd, &out, at).unwrap().unwrap(), 4096);
                    }
                });
            }
        });
        let mut out = [0; 4096];
        assert_eq!(rings.read(fd, &mut out, 33 * 4096).unwrap().unwrap(), 4096);
        assert_eq!(out, [1; 4096]);
        assert_eq!(rings.read(fd, &mut out, 1 << 20).unwrap().unwrap(), 0);
        assert!(rings.read(-1, &mut out, 0).unwrap().is_err());
    }

    /// One that waits for what never comes is woken by a signal, and goes on waiting: it is what a
    /// kill ends.
    #[test]
    fn who_waits_can_be_interrupted() {
        let Some(rings) = Rings::new() else {
            println!("skipped: this kernel has no io_uring for us");
            return;
        };
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let waits = AtomicBool::new(false);
        thread::scope(|scope| {
            let (rings, waits) = (&rings, &waits);
            let id = std::sync::mpsc::channel();
            let waiter = scope.spawn(move || {
                id.0.send(rustix::thread::gettid()).unwrap();
                waits.store(true, Ordering::Release);
                let mut out = [0; 8];
                (rings.read(reader.as_raw_fd(), &mut out, u64::MAX).unwrap().unwrap(), out)
            });
            let tid = id.1.recv().unwrap();
            // The state of a sleep that signals end; "D" is the other.
            let stat = format!("/proc/self/task/{}/stat", tid.as_raw_nonzero());
            loop {
                let stat = std::fs::read_to_string(&stat).unwrap();
                let state = stat.rsplit_once(") ").unwrap().1.as_bytes()[0];
                assert_ne!(state, b'D', "it cannot be killed");
                if waits.load(Ordering::Acquire) && state == b'S' {
                    break;
                }
                thread::yield_now();
            }
            rustix::io::write(&writer, b"at last!").unwrap();
            assert_eq!(waiter.join().unwrap(), (8, *b"at last!"));
        });
    }

    fn tempfile() -> std::fs::File {
        rustix::fs::memfd_create("rings", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
    }
}
