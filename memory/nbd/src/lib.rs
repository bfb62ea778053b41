//! An NBD server on a unix socket.
//!
//! ```text
//!  run: accept ─► a thread for each connection
//!                   handshake.rs   options, replies      (no I/O)
//!                   wire.rs        requests, replies     (no I/O)
//!                   connection.rs  socket ◄─► device::Queue
//! ```
//!
//! The server supports fixed newstyle with structured replies, block status (`base:allocation`),
//! trim, write-zeroes (no-hole, fast), FUA and flush (both have nothing to do), and multiple
//! connections with a consistent view (`CAN_MULTI_CONN`). Any alignment works: a partial page is
//! read, changed and stored in one step ([`device::Queue::patch`]). Clients without structured
//! replies, such as the kernel's, get simple ones. TLS, extended headers and several exports are
//! not supported.
//!
//! A connection may have many requests in flight. Small ones are done in order, on the connection's
//! thread, and answered together; large ones are done in slices by the device's workers, and may
//! overtake each other.
//!
//! # Errors
//!
//! A failed request gets an error reply, and the connection continues. A violation of the protocol
//! ends the connection, with a line for the server's operator. Clients do not affect each other:
//! each has its own thread and fixed buffers, and one that does not read its replies is not read
//! from.
//!
//! # Limits
//!
//! One export. Reads and writes of 32 MiB ([`MAX_REQUEST`]); a longer write ends the connection. 3
//! MiB of buffers a connection, or 1 ([`ServerOptions::compact`]); at most
//! [`ServerOptions::connections`] connections. The socket's mode decides who may connect; there is
//! no other authentication.

mod buffers;
mod connection;
mod handshake;
mod server;
mod slices;
mod wire;

pub use connection::{connection_memory, ConnectionError, MAX_SIMPLE_READ};
pub use handshake::{Export, Handshake, Progress, Refusal};
pub use server::{Server, ServerOptions, STRANDED};
pub use wire::{Broken, Command, Error, Parsed, Request, Session, MAX_REQUEST};
