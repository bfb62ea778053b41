//! Preallocated page slots, and the scan for same-filled pages.
//!
//! An [`Arena`] is one anonymous mapping cut into slots of equal size. A thread takes a [`Slot`],
//! fills it, hands it through rings to others, and whoever drops it gives it back:
//!
//! ```text
//!   Arena ── free list (a stack of slot numbers) ── take() ─► Slot ─► worker ─► ... ─► drop ─┐
//!     ▲                                                                                     │
//!     └────────────────────── number pushed back, one sleeper woken ◄───────────────────────┘
//! ```
//!
//! The number of slots bounds the memory in flight: a reader that finds none free waits. Nothing is
//! allocated after [`Arena::new`], and the kernel provides a page of the mapping when it is first
//! touched. A slot keeps what its last owner wrote: it is memory, not a message.
//!
//! [`same_filled`] and [`is_zero`] find the pages that need no codec.
//!
//! # What fails
//!
//! Only [`Arena::new`], when the mapping is refused. A slot that is leaked (`mem::forget`) is out
//! of the arena for good.
//!
//! # Limits
//!
//! Slot sizes are rounded up to [`PAGE_SIZE`]. An arena has at most `u32::MAX` slots.

mod arena;
mod scan;

pub use arena::{Arena, Slot};
pub use scan::{is_zero, same_filled};

/// The page of the hosts we run on, bytes. Guests may use larger ones; they are multiples of it.
pub const PAGE_SIZE: usize = 4096;
