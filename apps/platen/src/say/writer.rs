//! A thread that writes lines to a log file. The file's disk may not answer, or need memory that
//! only this process can free: the other threads wait for a line for a moment, and then no more
//! until the disk answers.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;

/// Lines that wait for the disk. Further ones are dropped, and counted.
const LINES: usize = 32;

/// How long a thread waits for its line: while the disk has the file, and in all. The thread that
/// writes may get no CPU.
const PATIENCE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// The stack of this thread, and of another that only looks at files, of which each uses 8 KiB. A
/// swap device locks the whole of it, in each of its processes.
pub(crate) const STACK: usize = if cfg!(debug_assertions) { 256 << 10 } else { 16 << 10 };

/// The lines, and the thread that writes them. The thread ends when this is dropped, and all lines
/// are written.
#[derive(Debug)]
pub(crate) struct Writer {
    queue: Arc<Queue>,
    patience: [Duration; 2],
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Vec<u8>>,
    /// Lines since the beginning.
    taken: u64,
    written: u64,
    dropped: u64,
    /// Since when the thread has been in the call that writes.
    writing: Option<Instant>,
    /// Whether a line was not written in time: no thread waits until all lines are written.
    late: bool,
    ended: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    /// Starts the thread, which passes each line to `write`.
    ///
    /// # Errors
    ///
    /// The kernel has no thread.
    pub(super) fn start(write: impl FnMut(&[u8]) + Send + 'static) -> io::Result<Self> {
        Self::with(PATIENCE, write)
    }

    fn with(
        patience: [Duration; 2],
        write: impl FnMut(&[u8]) + Send + 'static,
    ) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        queue.lock().lines.reserve_exact(LINES);
        let own = Arc::clone(&queue);
        let run = move || {
            // Signals are for the threads that wait for them.
            let _ = SigSet::all().thread_block();
            own.run(write);
        };
        thread::Builder::new().name("log".into()).stack_size(STACK).spawn(run)?;
        Ok(Self { queue, patience })
    }

    /// Has a line written; returns whether it was, or will be.
    pub(super) fn write(&self, line: &[u8]) -> bool {
        let Queue { changed, .. } = &*self.queue;
        let mut state = self.queue.lock();
        if state.lines.len() >= LINES {
            state.dropped += 1;
            return false;
        }
        state.lines.push_back(line.to_vec());
        state.taken += 1;
        changed.notify_all();
        let (own, since) = (state.taken, Instant::now());
        let [disk, all] = self.patience;
        while state.written < own && !state.late {
            let in_call = state.writing.map_or(Duration::ZERO, |since| since.elapsed());
            let left = disk.saturating_sub(in_call).min(all.saturating_sub(since.elapsed()));
            if left.is_zero() {
                state.late = true;
                break;
            }
            let waited = changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.queue.lock().ended = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn run(&self, mut write: impl FnMut(&[u8])) {
        let mut state = self.lock();
        loop {
            let Some(line) = state.lines.pop_front() else {
                if state.ended {
                    return;
                }
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.writing = Some(Instant::now());
            drop(state);
            write(&line);
            state = self.lock();
            state.written += 1;
            if state.lines.is_empty() && state.dropped > 0 {
                let dropped = std::mem::take(&mut state.dropped);
                drop(state);
                write(
                    format!("platen: the log took no lines for a time: {dropped} are lost\n")
                        .as_bytes(),
                );
                state = self.lock();
            }
            state.writing = None;
            state.late &= !state.lines.is_empty();
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn lines_for_a_disk_that_does_not_answer_hold_up_nobody_and_are_counted() {
        let (answer, answers) = mpsc::channel::<()>();
        let (said, log) = mpsc::channel();
        let write = move |line: &[u8]| {
            let _ = answers.recv();
            let _ = said.send(String::from_utf8_lossy(line).into_owned());
        };
        // The disk has the first line for longer than anybody waits.
        let writer = Writer::with([Duration::from_millis(1), LONG], write).unwrap();
        assert!(writer.write(b"0\n"));
        let taken = (1..100).filter(|n| writer.write(format!("{n}\n").as_bytes())).count();
        assert_eq!(taken, LINES);
        drop(answer);
        let lines: Vec<_> = (0..=LINES + 1).map(|_| log.recv().unwrap()).collect();
        let in_order = (0..=LINES).all(|n| lines[n] == format!("{n}\n"));
        assert!(in_order && lines[LINES + 1].contains("67 are lost"), "{lines:?}");
        drop(writer);
        assert!(log.recv().is_err(), "the thread ends, and says no more");
    }

    #[test]
    fn a_line_is_written_when_its_thread_goes_on() {
        let (said, log) = mpsc::channel();
        let writer = Writer::with([LONG; 2], move |line| said.send(line.to_vec()).unwrap());
        let writer = writer.unwrap();
        for n in 0..100_u8 {
            assert!(writer.write(&[n]));
            assert_eq!(log.try_recv(), Ok(vec![n]));
        }
    }
}
