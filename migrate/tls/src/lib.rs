//! Mutual TLS 1.3 between relays, and a small CA that makes it easy to set up.
//!
//! ```text
//!  files ─► Credentials ─┬─► Connector ─ handshake (rustls) ─┐        ┌─► Writer: plain ─► records ─► socket
//!                        └─► Acceptor ── handshake (rustls) ─┴► Channel
//!                                                                     └─► Reader: socket ─► records ─► plain
//! ```
//!
//! rustls does the parts that are easy to get wrong: the handshake, the certificates, the keys. A
//! link has a thread that writes and one that reads, but a rustls connection is one state machine
//! for both. So after the handshake the two directions separate. [`Writer`] and [`Reader`] each own
//! the keys of one direction and protect records themselves, as a kernel with kTLS would, with the
//! AEADs of aws-lc. Neither waits for the other: only a key update, once in 2^23 records, takes
//! their common lock, and no system call is made under a lock. Records are sealed from the caller's
//! buffer straight into the buffer for the socket, and opened straight into the caller's; nothing
//! is allocated.
//!
//! **What fails.** Every refusal is a [`TlsError`] whose message gives the reason: here from the
//! cause itself, at the peer from the alert. A link ends at a record that does not authenticate, a
//! socket that ends without `close_notify`, and anything but data where data is due. No bytes of a
//! peer cause a panic or an allocation without a bound.
//!
//! **Limits.** TLS 1.3 only, certificates on both sides always, no session tickets, no early data.
//! Revocation lists (CRLs) are not read: a certificate is excluded by its [`Fingerprint`]
//! ([`Credentials::refusing`]), by the allowed names, or by a new CA.

mod channel;
mod config;
mod error;
mod files;
mod fingerprint;
mod handshake;
mod issue;
mod mac;
mod network;
mod peer;
mod provider;
mod reader;
mod record;
mod writer;

pub use channel::Channel;
pub use config::{Acceptor, Connector};
pub use error::TlsError;
pub use files::{Credentials, CA_FILE, CERT_FILE, DEFAULT_DIR, KEY_FILE};
pub use fingerprint::Fingerprint;
pub use issue::{Authority, Issued};
pub use mac::{has_mac, mac, MAC_BYTES};
pub use network::network;
pub use peer::{is_name, Peer};
pub use reader::Reader;
pub use writer::Writer;
