//! The relay beside the source QEMU: accepts its connections, reads them, compresses, sends; hands
//! the return path back.
//!
//! ```text
//! connect ─► run ─► doubt ─┐        encode (codec threads)
//!    │                     ├─► shared ─► keeper
//!    └─► intake ─► chunk ──┤
//!            └─► hand_back ┘        sink (what the session tells)
//! ```

mod chunk;
mod config;
mod connect;
mod doubt;
mod encode;
mod hand_back;
mod handle;
mod intake;
mod keeper;
mod run;
mod shared;
mod sink;

pub use config::SourceConfig;
pub use handle::{Progress, SourceHandle};
pub use keeper::{keep, Keeper};
pub use run::{Source, SourceEnd};
