//! Whether there is memory for a connection and its thread. A failed allocation in the thread would
//! abort the process; so would the thread's start without memory for its signal stack.
#![expect(unsafe_code, reason = "maps memory that nothing accesses, and unmaps it")]

use std::ptr::null_mut;
use std::thread::ScopedJoinHandle;

use rustix::mm::{mmap_anonymous, munmap, MapFlags, ProtFlags};

/// The most that a thread's start takes beside its stack, in bytes: guard pages, and the stack of
/// the signal handler (8 KiB, 11 KiB on processors with wide registers).
const BESIDE_STACK: usize = 32 << 10;

/// The threads of connections. The C library keeps the stacks of those that have ended.
pub(super) struct Threads<'scope> {
    running: Vec<ScopedJoinHandle<'scope, ()>>,
    stacks: usize,
    /// The size in bytes that std gives to the stacks of threads.
    stack: usize,
}

impl<'scope> Threads<'scope> {
    pub(super) fn new() -> Self {
        let set = std::env::var("RUST_MIN_STACK").ok();
        let stack = set.and_then(|bytes| bytes.parse().ok()).unwrap_or(2 << 20);
        Self { running: Vec::new(), stacks: 0, stack }
    }

    /// The bytes that the next thread's stack needs: none where one of an ended thread is free.
    ///
    /// # Panics
    ///
    /// If a thread has panicked.
    pub(super) fn next_stack(&mut self) -> usize {
        // A stack is free once its thread is joined.
        while let Some(at) = self.running.iter().position(ScopedJoinHandle::is_finished) {
            self.running.swap_remove(at).join().expect("a connection's thread panicked");
        }
        if self.running.len() < self.stacks {
            0
        } else {
            self.stack
        }
    }

    pub(super) fn add(&mut self, thread: ScopedJoinHandle<'scope, ()>) {
        self.running.push(thread);
        self.stacks = self.stacks.max(self.running.len());
    }
}

/// Memory of the heap that a connection will need. It is reserved and not touched.
pub(super) type Reserved = Vec<u8>;

/// Reserves `heap` bytes, if the process may also map a thread's stack of `stack` bytes. The heap
/// may have free memory where the kernel gives the process no more, so each is tried.
pub(super) fn reserve(heap: usize, stack: usize) -> Option<Reserved> {
    let mut bytes = Reserved::new();
    bytes.try_reserve_exact(heap).ok()?;
    may_map(stack + BESIDE_STACK).then_some(bytes)
}

fn may_map(len: usize) -> bool {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an address where nothing is mapped.
    let Ok(start) = (unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE) }) else {
        return false;
    };
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { munmap(start, len) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_memory_is_detected_before_its_use() {
        assert!(reserve(4 << 20, 2 << 20).is_some());
        assert!(reserve(usize::MAX / 2, 0).is_none());
        assert!(!may_map(usize::MAX / 2));
    }
}
