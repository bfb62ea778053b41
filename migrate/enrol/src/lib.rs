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
//! The token works in both directions: its hash tells the new host that it speaks to the host of
//! the CA, before it says anything; its secret tells the host of the CA that the new host is the
//! one that was meant. Nobody who only sees the network, or answers in the other's place, learns
//! the secret. The key of the CA stays on its host, the key of the new host on the new one. The
//! names in the certificate are those that the host of the CA has decided on, whatever the new host
//! says.
//!
//! **What fails.** A wrong secret is an error at the new host, which hears it after a second. It
//! ends no offer: anybody who reaches the port can send one. An offer ends with the first right
//! secret, and at its time. A new host that cannot write its files says so; a certificate that was
//! signed is in the list of the CA whatever has become of it.
//!
//! **Limits.** Messages of 64 KiB. Ten seconds for a connection until the new host has its
//! certificate, a minute until its files are written. [`AT_A_TIME`] connections at a time: one more
//! closes the oldest of the network that has the most.

mod error;
mod join;
mod message;
mod offer;
mod pinned;
mod room;
mod serve;
mod token;

pub use error::EnrolError;
pub use join::{join, Joined, Reply};
pub use offer::Offer;
pub use room::AT_A_TIME;
pub use token::Token;
