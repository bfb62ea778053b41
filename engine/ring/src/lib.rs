//! Bounded lock-free rings and the event count that lets their two ends sleep.
//!
//! [`Ring`] is a multi-producer, multi-consumer queue of fixed capacity whose cells carry sequence
//! numbers. [`EventCount`] is the wake-up beside it: a thread that finds the ring empty (or full)
//! sleeps until someone who changed it says so. The two are apart because one ring may have two
//! waits (for items, for room), one, or none.
//!
//! ```text
//!   producer                                consumer
//!   ring.push(item)?            cells       items.wait_until(None, || ring.pop())
//!   items.notify_one()  ─────► [s|s|s|s] ─────►  spin a little, then futex wait
//!        │ nobody sleeps: a fence and a load, no system call
//!        └ somebody sleeps: one futex wake, however many notifications follow it
//! ```
//!
//! [`Stack`] is a free list: numbers, the one put back last first, because what it stands for is
//! still in the cache.
//!
//! # What fails
//!
//! `push` gives the item back when the ring is full and `pop` gives `None` when it is empty;
//! neither blocks nor allocates. Both may also say so when another thread has claimed the next
//! cell and not yet finished with it: that thread notifies when it has, so a sleeper loses nothing.
//!
//! # Limits
//!
//! Capacity is a power of two, at least 2. One event count serves at most 32,767 sleepers at a
//! time, all of whom wait for the same kind of thing (see [`EventCount::notify_one`]).
//!
//! # Proof
//!
//! `tests/oracle.rs` runs operation lists against a `VecDeque`, `tests/stress.rs` real threads, and
//! `tests/loom.rs` every interleaving of small models; `scripts/loom` runs those, and once more for
//! each memory ordering made weaker, where a model has to fail. Atomics are named in `sync.rs`
//! alone.

mod event;
mod queue;
mod stack;
mod sync;

pub use event::{EventCount, Fenced};
pub use queue::Ring;
pub use stack::Stack;
#[cfg(loom)]
pub use sync::Site;
