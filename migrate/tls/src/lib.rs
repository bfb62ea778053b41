//! Mutual TLS 1.3 between relays, and the small CA that makes it easy to have.
//!
//! ```text
//!  files ─► Credentials ─┬─► Connector ─ handshake (rustls) ─┐        ┌─► Writer: plain ─► records ─► socket
//!                        └─► Acceptor ── handshake (rustls) ─┴► Channel
//!                                                                     └─► Reader: socket ─► records ─► plain
//! ```
//!
//! rustls does what can be got wrong: the handshake, the certificates, the keys. A link has a
//! thread that writes and one that reads, and rustls's connection is one state machine for both, so
//! after the handshake the two directions part:
//! [`Writer`] and [`Reader`] each own the keys of one direction and protect records by themselves, as a kernel with kTLS
//! would, with the AEADs of aws-lc. Neither ever waits for the other; only a key update, once in
//! 2^23 records, takes their common lock, and no lock is held over a system call. Records are
//! sealed from the caller's buffer straight into the one that goes to the socket, and opened
//! straight into the caller's; nothing is allocated on the way.
//!
//! **What fails.** Every refusal is a [`TlsError`] whose message names the reason, here by what was
//! seen and at the peer by the alert that it gets. A record that does not authenticate, a socket
//! that ends without `close_notify` and anything but data where data is due end the link. Nothing a
//! peer sends panics or is allocated for without a bound.
//!
//! **Limits.** TLS 1.3 only, certificates on both sides always, no session tickets, no early data.
//! Revocation lists are not read: a host is shut out by a new CA or by the names that are allowed.

mod config;
mod error;
mod files;
mod handshake;
mod issue;
mod peer;
mod provider;
mod record;

pub use config::{Acceptor, Connector};
pub use error::TlsError;
pub use files::{Credentials, CA_FILE, CERT_FILE, DEFAULT_DIR, KEY_FILE};
pub use issue::{Authority, Issued};
pub use peer::Peer;
pub use record::{Channel, Reader, Writer};
