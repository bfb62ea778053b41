//! Limits on the bytes that sessions send per second: of one session, or of all sessions of a host
//! together.
//!
//! ```text
//!  session ─ Cap: its own limit
//!     └───── Turns ─► memory: the limit of all, and whose VM has stopped ◄─ Turns ─ other processes
//! ```
//!
//! A [`Cap`] is one number: the time up to which the bytes so far take at the limited rate. The
//! number lies in the process, or in memory that several processes map ([`Turns`]). Each writer
//! writes a slice, and adds the slice's time to the number.
//!
//! **Fair shares.** All sessions wait for the same moment, and each is as likely to be first. The
//! first one writes a slice in proportion to its priority. A session that has nothing to write
//! leaves its share to the others.
//!
//! **A stopped VM has priority.** Its session announces it ([`Turns::hurry`]). For up to 2 s the
//! other sessions pause before each slice, for half a second at most, so that their links do not
//! become silent. They pause until the last announcement has ended or is withdrawn.
//!
//! **What fails.** Nothing, once the memory is mapped. A process that dies leaves a number behind
//! that is seconds ahead at most, and an announcement that ends by itself.

mod cap;
mod map;
mod shared;
mod stopped;

pub use cap::Cap;
pub use shared::{Priority, Turns};
