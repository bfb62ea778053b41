//! Preallocated page slots, and the scan for same-filled pages.
//!
//! An [`Arena`] is one anonymous mapping, cut into slots of equal size. A thread takes a [`Slot`],
//! fills it and passes it through rings to others. The thread that drops the slot frees it:
//!
//! ```text
//!   Arena ── free list (a stack of slot numbers) ── take() ─► Slot ─► worker ─► ... ─► drop ─┐
//!     ▲                                                                                     │
//!     └────────────────────── number pushed back, one sleeper woken ◄───────────────────────┘
//! ```
//!
//! The number of slots bounds the memory in flight: a reader that finds none free waits. Nothing is
//! allocated after [`Arena::new`]; the kernel provides a page of the mapping when it is first
//! touched. A slot still holds the bytes of its last owner.
//!
//! [`same_filled`] finds the pages that need no codec.
//!
//! # What fails
//!
//! Only [`Arena::new`], when the kernel refuses the mapping. A leaked slot (`mem::forget`) is lost
//! to the arena.
//!
//! # Limits
//!
//! Slot sizes are rounded up to [`PAGE_SIZE`]. An arena has at most `u32::MAX` slots.

mod arena;
mod scan;

pub use arena::{Arena, Slot};
pub use scan::same_filled;

/// The page size of the supported hosts, in bytes. Guests may use larger pages, which are multiples
/// of it.
pub const PAGE_SIZE: usize = 4096;
