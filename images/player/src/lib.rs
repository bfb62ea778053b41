//! Sends a saved VM to QEMU: as a plain stream, as a mapped-ram file, or as the source of a
//! postcopy migration.
//!
//! ```text
//!            ┌─ threads: read, check, decode units ────┐
//!  Image ────┤                                         ├─► plain(): every page, then the devices
//!            └─ state: configuration, block table, ... └─► play(): the devices, then pages on
//!                                                            request, then the rest
//! ```
//!
//! [`plain()`] writes the stream of a precopy migration: the guest runs once all of it is loaded.
//! With [`Reader::EmptyQemu`] it sends ADVISE before the RAM section, on which QEMU discards all
//! of its RAM, and no zero pages. [`mapped_ram()`] writes a file in which each page has a fixed
//! place, as a QEMU with capability `mapped-ram` does. [`Player::play`] acts as the source of a
//! postcopy migration: the guest runs at once. When it touches a missing page, QEMU requests that
//! page over the return path, and it is sent next. The others follow in the background.
//! [`Player::resume`] continues after a player has died. [`Player::prepare`] reads the pages that
//! earlier restores requested: they are sent before the guest runs, and cost it no requests.
//! Players of one image may share a [`UnitCache`]: a unit that one of them has decoded is sent by
//! all.
//!
//! [`Player::play`] sends, in this order:
//!
//! 1. Header and configuration, OPEN_RETURN_PATH, PING 1, ADVISE with the page sizes, the RAM
//!    section with its block table, and the sections that precede the pages.
//! 2. One RAM_DISCARD for each block. Without any, QEMU's LISTEN falls back to loading as in
//!    precopy, and locks up on its own userfault.
//! 3. The prepared pages. Before the discards QEMU could map them as transparent huge pages, of
//!    which the rest would read as zero.
//! 4. PING 2, PACKAGED with LISTEN, all device sections, PING 3 and RUN; then PING 4.
//! 5. The other pages, each once. Requests are answered from this point on, since loading a device
//!    may touch RAM.
//! 6. END, only after PONG 3, since a device that is being loaded may still request pages. Then the
//!    end of the stream; the socket stays open until SHUT.
//!
//! Zero pages are sent only on request: the discards have emptied the blocks, so pages that never
//! arrive read as zero.
//!
//! # What fails
//!
//! [`PlayError`] reports a damaged unit (nothing of it is sent), a QEMU that closes its socket, or
//! a violation of the protocol. In postcopy QEMU then pauses, and [`Player::resume`] can continue
//! with the same image or a copy. A player that dies before QEMU has read RESUME must not be the
//! last to hold the connection: see [`Recovery`]. QEMU's bytes are hostile input: requests outside
//! their block, floods and unknown messages end the restore, and the memory for them is bounded.
//!
//! # Limits
//!
//! [`Player`] requires pages of 4096 bytes in the guest and on the host, and no huge pages.

mod ahead;
mod back;
mod cache;
mod error;
mod hot;
mod mapped;
mod opening;
mod pending;
mod plain;
mod recovery;
mod runs;
mod serve;
mod socket;
mod source;
mod units_in_order;
mod wire;

pub use back::{Message, ReturnPath};
pub use cache::{Decoded, UnitCache};
pub use error::PlayError;
pub use hot::HotLimits;
pub use mapped::mapped_ram;
pub use plain::{plain, PlainOptions, Reader};
pub use recovery::Recovery;
pub use source::{Event, PlayOptions, Played, Player};
