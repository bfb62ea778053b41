//! Bounded lock-free rings, and the event count that lets producers and consumers sleep.
//!
//! [`Ring`] is a multi-producer, multi-consumer queue of fixed capacity whose cells carry sequence
//! numbers. [`EventCount`] provides the wake-up: a thread that finds the ring empty (or full)
//! sleeps until another thread changes it and notifies. The two are separate because one ring may
//! need two waits (for items, for room), one, or none.
//!
//! ```text
//!   producer                                consumer
//!   ring.push(item)?            cells       items.wait_until(None, || ring.pop())
//!   items.notify_one()  ─────► [s|s|s|s] ─────►  spin a little, then futex wait
//!        │ no sleeper: a fence and a load, no system call
//!        └ a sleeper: one futex wake, however many notifications follow it
//! ```
//!
//! [`Stack`] is a free list of numbers. It returns the number pushed last first, because the memory
//! behind that number is still in the cache.
//!
//! # What fails
//!
//! `push` gives the item back when the ring is full, and `pop` returns `None` when it is empty;
//! neither blocks nor allocates. Both may also do so while another thread has claimed the next cell
//! and not finished with it. That thread notifies when it has, so a sleeper misses nothing.
//!
//! # Limits
//!
//! Capacity is a power of two, at least 2. One event count serves at most 32,767 sleepers at a
//! time, all of which wait for the same kind of condition (see [`EventCount::notify_one`]).
//!
//! # Proof
//!
//! `tests/oracle.rs` runs operation lists against a `VecDeque`, `tests/stress.rs` runs real
//! threads, and `tests/loom.rs` runs every interleaving of small models. `scripts/loom` runs these
//! models, and once more for each weakened memory ordering, where a model has to fail. Only
//! `sync.rs` names atomics.

mod event;
mod queue;
mod stack;
mod sync;

pub use event::{EventCount, Fenced};
pub use queue::Ring;
pub use stack::Stack;
