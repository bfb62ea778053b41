//! Gives a new host its certificate, by a one-time token.
//!
//! ```text
//!  host of the CA                                     new host
//!  Offer: token = secret + hash of the CA ──(a person, or ssh)──► Token
//!                                                     makes its key
//!  TLS: a certificate of the CA         ────────────► the CA has that hash? else nothing is said
//!  secret right, not used, not expired? ◄──────────── secret, public key, signature by the key
//!  certificate, CA, configuration       ────────────► checked, then written
//! ```
//!
//! The token works in both directions: its hash tells the new host that it speaks to the host of the
//! CA, before it says anything; its secret tells the host of the CA that the new host is the one that
//! was meant. Nobody who only sees the network, or answers in the other's place, learns the secret.
//! The key of the CA stays on its host, the key of the new host on the new one. The names in the
//! certificate are those that the host of the CA has decided on, whatever the new host says.
//!
//! **What fails.** A wrong secret is an error at the new host, and counts at the other: after
//! [`ATTEMPTS`] of them the offer ends. An offer ends with its first success, and at its time.
//!
//! **Limits.** Messages of 64 KiB, ten seconds for a connection, [`AT_A_TIME`] connections at a time.

mod error;
mod join;
mod message;
mod offer;
mod pinned;
mod token;

pub use error::EnrolError;
pub use join::{join, Joined};
pub use offer::{Offer, ATTEMPTS, AT_A_TIME};
pub use token::Token;
