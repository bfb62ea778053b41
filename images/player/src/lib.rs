//! Gives a saved VM to a QEMU: as a plain stream, or as the source of a postcopy migration.
//!
//! ```text
//!            ┌─ lanes: read a unit, check it, decode it ─┐
//!  Image ────┤                                           ├─► plain(): every page, then the devices
//!            └─ state: configuration, block table, ...   └─► play(): the devices, then pages as
//!                                                              QEMU asks for them, and the rest
//! ```
//!
//! [`plain()`] writes the stream of an ordinary migration: the guest runs when all of it is loaded.
//! [`play`] makes QEMU believe that a source migrates to it by postcopy: the guest runs at once, a
//! page that it touches is asked for over the return path and sent next, and the others follow.
//! [`resume`] goes on where a player that died has stopped.
//!
//! What QEMU has to be told, in this order, and why:
//!
//! 1. Header and configuration, OPEN_RETURN_PATH, PING 1, ADVISE with the page sizes, the section
//!    of RAM with its block table, and the sections that stand before the pages.
//! 2. One RAM_DISCARD for each block. Without any, QEMU's LISTEN falls back to loading as in
//!    precopy, and locks up on its own userfault.
//! 3. PING 2, PACKAGED with LISTEN, all device sections, PING 3 and RUN; then PING 4.
//! 4. Requests are answered from that moment: loading a device may touch RAM. A page is sent once.
//! 5. END only after PONG 3, because a device that loads may still ask. Then the end of the stream;
//!    the socket stays open until SHUT.
//!
//! Pages that are zero are sent only if QEMU asks: what never arrives reads as zero, since the
//! discards have emptied the blocks.
//!
//! # What fails
//!
//! [`PlayError`]: a unit that is not sound (nothing of it is sent), a QEMU that closes its socket or
//! says what it must not. In postcopy QEMU then pauses, and [`resume`] can go on with the same or
//! another copy of the image. QEMU's bytes are hostile input: requests outside their block, floods
//! and unknown messages end the restore, and what is kept of them is bounded.
//!
//! # Limits
//!
//! [`play`] serves guests with pages of 4096 bytes on hosts with such pages; not huge pages.

mod back;
mod error;
mod lanes;
mod pending;
mod plain;
mod runs;
mod serve;
mod socket;
mod source;
mod wire;

pub use back::{Message, ReturnPath};
pub use error::PlayError;
pub use plain::{plain, PlainOptions};
pub use source::{play, resume, Event, PlayOptions, Played};
