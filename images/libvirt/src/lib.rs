//! A client of libvirt's daemon, with the calls that start a saved VM as an incoming migration.
//!
//! libvirt's own migration has three parties. The client (`virsh migrate`) asks the daemon of the
//! destination to prepare; the source's QEMU connects and sends; and the client asks the
//! destination to finish. There is no source here: platen is the client, and its player sends.
//!
//! ```text
//!  platen ── prepare(domain, socket) ──► libvirtd ── starts QEMU, which listens at the socket
//!  player ── the stream of a postcopy migration ─────────────────────────► QEMU
//!  platen ── finish ───────────────────► libvirtd ── cont ──► QEMU; answers at the end of postcopy
//! ```
//!
//! The calls are part of the daemon's RPC at its unix socket. They need no library of libvirt's.
//! [`Domain`] reads from a domain's XML what the migration's cookie must repeat.
//!
//! # What fails
//!
//! Every call but [`Connection::finish`] has a deadline. [`LibvirtError::Said`] is libvirt's own
//! message. A daemon that is restarted closes the connection ([`LibvirtError::Closed`]). If the
//! connection ends between `prepare` and `finish`, libvirt destroys the VM, which has not run; once
//! the daemon works on `finish`, the end of the connection changes nothing.
//!
//! # Limits
//!
//! A message has at most 8 MiB, an XML at most 4 MiB (libvirt's own limit) and 256 levels. The
//! client uses only unix sockets, and no authentication but that of the socket: the daemon requires
//! none of root.

mod calls;
mod connection;
mod domain;
mod error;
mod xdr;
mod xml;

pub use calls::{Handover, Owner, State, Why};
pub use connection::Connection;
pub use domain::Domain;
pub use error::{LibvirtError, XmlError};
