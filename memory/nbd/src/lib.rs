//! An NBD server on a unix socket.
//!
//! ```text
//!  run: accept ─► a thread for each connection
//!                   handshake.rs   options, replies      (no I/O)
//!                   wire.rs        requests, replies     (no I/O)
//!                   connection.rs  socket ◄─► device::Queue
//! ```
//!
//! It speaks fixed newstyle with structured replies, block status (`base:allocation`), trim,
//! write-zeroes (no-hole, fast), FUA and flush (which have nothing to do), and says that several
//! connections see the same. Any alignment will do: a part of a page is read, changed and stored as
//! one ([`device::Queue::patch`]). Clients without structured replies, the kernel's among them, get
//! simple ones. Not spoken: TLS, extended headers, several exports.
//!
//! Many requests may be on the way on one connection: small ones are done in the order they come,
//! on the connection's thread, and answered together; large ones go in slices that the device's
//! workers share, and overtake each other.
//!
//! # What fails
//!
//! A request is answered with an error of the protocol, and the connection goes on. What is not the
//! protocol ends the connection, with a line for whoever runs the server. No client harms another
//! one: each has its own thread and fixed buffers, and one that does not read is not read from.
//!
//! # Limits
//!
//! One export. Reads and writes of 32 MiB ([`MAX_REQUEST`]); a longer write ends the connection. 3
//! MiB of buffers for a connection whatever it does; [`ServerOptions::connections`] of them. Who
//! may connect is the socket's mode: there is no other authentication.

mod buffers;
mod connection;
mod handshake;
mod server;
mod slices;
mod wire;

pub use connection::{ConnectionError, CONNECTION_MEMORY};
pub use handshake::{Export, Handshake, Progress, Refusal};
pub use server::{Server, ServerOptions, STRANDED};
pub use wire::{Broken, Command, Error, Parsed, Request, Session, MAX_REQUEST};
