//! Parses a QEMU migration stream into pages and device state.
//!
//! ```text
//!  bytes of QEMU ─► Source ─┬─► grammar ─► header, configuration, block table ─► State
//!                           │      ├─────► pages, zero pages ──► Sink (an image's Writer)
//!                           │      └─────► device sections, description ──► State
//!                           └─► Tokeniser (crate stream): must count the same pages
//! ```
//!
//! [`record()`] reads a migration of a single stream, from its file header to its end. Crate
//! `stream` parses the same bytes for a relay. There a wrong guess costs compression ratio, and
//! unknown bytes pass through. Here a wrong guess would cost the VM. This grammar is therefore
//! strict: unknown bytes end the recording with an offset and a reason. The tokeniser parses the
//! stream as well, and both have to count the same pages.
//!
//! QEMU's background-snapshot sends each page once and no end of RAM. Its device state follows the
//! last page; a stream that lacks a page is refused.
//!
//! Device sections carry no length. The state ends where QEMU's vmdescription ends: `00 06`, a
//! length that fits, and JSON. Each device that the description lists has to be found in the state,
//! in order.
//!
//! [`Multifd`] reads a migration by multifd: the main channel, and the channels with the pages,
//! each on a thread of the caller. Connections wait for each other at QEMU's barriers only, so the
//! last version of a page is passed on last, and no page is held back.
//!
//! ```text
//!  channel 0 ─► packets ─► pages ─► SYNC ─┐ waits ┌─► packets ...
//!  channel 1 ─► packets ─► pages ─► SYNC ─┤       ├─► packets ...
//!  main ─────► zero pages ───────► barrier┴───────┴─► zero pages ...
//! ```
//!
//! [`record_file()`] also reads QEMU's mapped-ram files, whose pages lie at fixed places. The pages
//! are read once the rest of the file is known to be whole. The tokeniser cannot follow them.
//!
//! [`beginning()`] reads the head of the file that `virsh save` writes; [`head()`] makes one.
//!
//! # What fails
//!
//! [`RecordError`] reports a defect of the stream with its offset, a feature that a save must not
//! use with its remedy, or the sink's error. Nothing panics. The block table (see `image`) and the
//! limit of 511 MiB of device state bound the memory. A multifd channel has a buffer of 520 KiB.
//!
//! # Limits
//!
//! Precopy streams of QEMU 7.2 to 11.1, stream version 3. No XBZRLE, `compress`, multifd
//! compression, x-ignore-shared or COLO, and no iterated section other than RAM (VFIO, block
//! bitmaps). A mapped-ram file has the byte order of the host that wrote its bitmaps; only those of
//! little-endian hosts are read.

mod channel;
mod configuration;
mod error;
mod libvirt;
mod mapped;
mod multifd;
mod packet;
mod ram;
mod record;
mod section;
mod sink;
mod source;
mod tail;
mod target;

pub use error::RecordError;
pub use libvirt::{beginning, head, Beginning, SaveFormat, SaveHead, SaveHeadError};
pub use multifd::Multifd;
pub use record::{record, record_file, Ending, Recorded};
pub use sink::Sink;
