//! Raw deflate by Intel's Query Processing Library, libqpl: on an IAA device, or on the CPU.
//!
//! ```text
//!  libqpl.so.1 ─dlopen─► Library ─► Qpl::open: version, job size, a known unit there and back
//!                                     │ shared
//!                       codec::Encoder ◄── Compressor (one a thread) ─► Job: its own buffers
//! ```
//!
//! A [`Compressor`] is a [`codec::Deflate`]: its units are those of codec zlib, and any peer reads
//! them. libqpl's *software path* runs on any CPU. Its *hardware path* needs an Intel IAA device;
//! it is used where the library has one, and **nobody has seen it run under platen**.
//!
//! # What fails
//!
//! Absence is normal: [`LoadError`] and [`OpenError`] name the missing part. Afterwards nothing
//! fails: libdeflate makes the units that libqpl does not make, and [`Counters`] counts them.
//!
//! | libqpl | what the compressor does |
//! |---|---|
//! | refuses a job, or ends it with a status | makes the unit by libdeflate; after three in a row goes on without libqpl |
//! | states more bytes than it had room for | the same |
//! | has full queues | tries again until the deadline, then the same |
//! | does not answer by the deadline | gives the job up with its memory, to which a device may still write, and goes on without libqpl |
//! | makes a stream that does not inflate to its input | the same unit by libdeflate, and goes on without libqpl |
//!
//! One unit in [`Options::verify_every`] is inflated and compared. The receiver compares a checksum
//! of every unit: a wrong stream costs a migration, never a byte.
//!
//! # Limits
//!
//! Compression only; units are inflated by libdeflate. libqpl 1.x (its job structure is that of
//! 1.9). One job a thread, and one unit in flight a job: a thread waits for its device. Not with
//! `QPL_FLAG_ZLIB_MODE`: with it a job that is used again writes a wrong Adler-32.

mod abi;
mod compressor;
mod counters;
mod library;
mod load;
mod open;

pub use compressor::{Compressor, Options};
pub use counters::{Counters, Snapshot};
pub use library::{Job, Library, Path, Status};
pub use load::{LoadError, Loaded, LIBRARY};
pub use open::{OpenError, Qpl};
