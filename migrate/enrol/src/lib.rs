//! Gives a new host its certificate, by a one-time token.
//!
//! ```text
//!  host of the CA                                     new host
//!  Offer: token = secret + hash of the CA ──(a person, or ssh)──► Token
//!                                                     makes its key
//!  TLS: a certificate of the CA         ────────────► the CA has that hash? else nothing is said
//!  secret right, not used, not expired? ◄──────────── secret, public key, signature by the key
//!  certificate, CA, configuration       ────────────► checked, then written
//!  the host has joined                  ◄──────────── the files are written
//! ```
//!
//! The token authenticates both ends. By its hash the new host checks that it is connected to the
//! host of the CA, before it sends anything. By its secret the host of the CA recognises the new
//! host. A host that only sees the network, or answers in the place of the other one, does not
//! learn the secret. The key of the CA stays on its host, the key of the new host on the new one.
//! The host of the CA decides on the names in the certificate, whatever the new host asks for.
//!
//! **What fails.** A wrong secret is an error at the new host, which gets it after a second. It
//! does not end the offer: any host that can connect to the port can send one. An offer ends with
//! the first right secret, or when it expires. A new host that cannot write its files reports that.
//! The list of the CA has every certificate that was signed, whatever the outcome.
//!
//! **Limits.** Messages of 64 KiB. Ten seconds for a connection until the new host has its
//! certificate, a minute until its files are written. [`AT_A_TIME`] connections at a time: one more
//! closes the oldest of the network that has the most.

mod connections;
mod error;
mod join;
mod message;
mod offer;
mod pinned;
mod serve;
mod token;

pub use connections::AT_A_TIME;
pub use error::EnrolError;
pub use join::{join, Joined, Reply};
pub use offer::Offer;
pub use token::Token;
