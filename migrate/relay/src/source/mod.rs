//! The relay beside the source QEMU: accepts its connections, reads and compresses them, sends
//! frames, and writes the return path back.
//!
//! ```text
//! connect ─► run ─► decision ─► doubt ────┐     encode (codec threads) ─► history
//!    └─► admission ─► intake ─► chunk ───┼─► shared ─► keeper ═► keeping
//!            └──────► hand_back ─────────┘     sink (calls of the session)
//! ```
//!
//! `keeping` is the work of another process, `platen keep`. `last_events` has the events behind the
//! end of a session. `hung` watches the library of the codec threads' accelerator.
//!
//! `disk` takes the place of `run` and all of the second line in a session of an NBD connection.

mod admission;
mod channel_deltas;
mod chunk;
mod config;
mod connect;
mod decision;
mod deltas;
mod differences;
mod disk;
mod doubt;
mod encode;
mod end_of_stream;
mod hand_back;
mod handle;
mod history;
mod hung;
mod intake;
mod keeper;
mod keeping;
mod last_events;
mod reach;
mod run;
mod shared;
mod sink;
#[cfg(test)]
mod test_session;

pub use config::{PageSink, SourceConfig, ANSWER_TIMEOUT, SETUP_TIMEOUT};
pub use differences::{take_differences, Differences};
pub use disk::DiskError;
pub use handle::{Progress, SourceHandle};
pub use keeper::Keeper;
pub use keeping::keep;
pub use run::{Source, SourceEnd};
