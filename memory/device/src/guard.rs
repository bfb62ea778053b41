//! An allocator that aborts the process when an I/O thread allocates.
//!
//! A swap server that allocates memory in order to write a page out may wait for that very page to
//! be written. So nothing between a request and its completion allocates. A debug build checks
//! that: the binary installs [`Allocator`], and I/O threads hold an [`IoPath`] while they work.
//!
//! ```
//! #[cfg(debug_assertions)]
//! #[global_allocator]
//! static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;
//! ```
//!
//! The allocator sees only Rust's allocations. The C codecs allocate when they are set up; the
//! tests of `codec` count their allocations.
#![expect(unsafe_code, reason = "an allocator is unsafe to write")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// The number of [`IoPath`]s that this thread holds. A constant without a destructor: reading
    /// it never allocates.
    static HELD: Cell<u32> = const { Cell::new(0) };
}

/// While a thread holds this value, the thread must not allocate. It costs nothing in a release
/// build.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct IoPath {
    _here: PhantomData<*const ()>,
}

impl IoPath {
    /// Forbids allocations of this thread from here on.
    #[inline]
    pub fn enter() -> Self {
        if cfg!(debug_assertions) {
            HELD.with(|held| held.set(held.get() + 1));
        }
        Self { _here: PhantomData }
    }
}

impl Drop for IoPath {
    #[inline]
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.with(|held| held.set(held.get() - 1));
        }
    }
}

/// The system's allocator, which aborts with a message on a thread that holds an [`IoPath`]. A
/// panicking thread may allocate, so that its message is printed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocator;

impl Allocator {
    #[inline]
    fn check() {
        if cfg!(debug_assertions) && HELD.with(Cell::get) > 0 {
            Self::refuse();
        }
    }

    #[cold]
    fn refuse() {
        if std::thread::panicking() {
            return;
        }
        // Directly to the file: printing might allocate. A failure makes no difference.
        let _ = rustix::io::write(
            rustix::stdio::stderr(),
            b"platen: an I/O thread allocated memory; see device::guard\n",
        );
        std::process::abort();
    }
}

// SAFETY: every method is `System`'s, after a check that either returns or aborts.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::check();
        // SAFETY: the caller's promise is `System`'s.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::check();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::check();
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, size) }
    }
}
