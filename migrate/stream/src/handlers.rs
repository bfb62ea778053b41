//! Bodies of the other iterative handlers whose sections may occur between those of RAM.
//!
//! They are skipped by length, so that the parser stays in step (and barrier markers keep counting)
//! in guests with VFIO devices, persistent dirty bitmaps or old block migration. Unexpected bytes
//! are reported, and the main channel then looks for RAM again.

use crate::cursor::{be64, Feed, Gather};

/// The handler that writes a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handler {
    DirtyBitmap,
    Vfio,
    /// Block migration, up to QEMU 9.0.
    Block,
}

impl Handler {
    /// The handler for a section's id string.
    pub(crate) fn of(name: &[u8]) -> Option<Handler> {
        match name {
            b"dirty-bitmap" => Some(Handler::DirtyBitmap),
            b"block" => Some(Handler::Block),
            _ => name.ends_with(b"/vfio").then_some(Handler::Vfio),
        }
    }
}

/// The parser's position in a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Record,
    BitmapNode { flags: u8 },
    BitmapName { flags: u8 },
    BitmapBody { flags: u8 },
    DataLen,
    BlockName { zero: bool },
    BlockData,
}

/// The result of parsing one field of a body.
pub(crate) enum Step {
    /// Continue at `at`, after `skip` bytes.
    Go { at: At, skip: u64 },
    /// The body ended.
    End,
    /// The bytes are not a body of this handler.
    Surprise,
}

/// Longest piece of VFIO data or of a bitmap accepted.
const MAX_DATA: u64 = 1 << 30;
/// The length of a block in block migration.
const BLOCK_LEN: u64 = 1 << 20;

const BITMAP_EOS: u8 = 0x01;
const BITMAP_ZEROES: u8 = 0x02;
const BITMAP_NAME: u8 = 0x04;
const BITMAP_NODE: u8 = 0x08;
const BITMAP_START: u8 = 0x10;
const BITMAP_COMPLETE: u8 = 0x20;
const BITMAP_BITS: u8 = 0x40;

const VFIO_END: u64 = 0xffff_ffff_ef10_0001;
const VFIO_SETUP: u64 = 0xffff_ffff_ef10_0003;
const VFIO_DATA: u64 = 0xffff_ffff_ef10_0004;
const VFIO_INIT_DATA_SENT: u64 = 0xffff_ffff_ef10_0005;

const BLOCK_DEVICE: u64 = 0x01;
const BLOCK_EOS: u64 = 0x02;
const BLOCK_PROGRESS: u64 = 0x04;
const BLOCK_ZERO: u64 = 0x08;
/// The flags are below the sector number.
const BLOCK_FLAGS: u64 = 0x1ff;

/// Parses one field of a body; `None` when it needs bytes of the next feed.
pub(crate) fn step(
    handler: Handler,
    at: At,
    gather: &mut Gather,
    feed: &mut Feed<'_>,
) -> Option<Step> {
    let go = |at| Step::Go { at, skip: 0 };
    Some(match (at, handler) {
        (At::Record, Handler::DirtyBitmap) => match gather.field(feed, 1)?[0] {
            BITMAP_EOS => Step::End,
            flags if flags & 0x80 == 0 => go(At::BitmapNode { flags }),
            // Flags of two or four bytes: no QEMU writes these.
            _ => Step::Surprise,
        },
        (At::BitmapNode { flags }, _) if flags & BITMAP_NODE == 0 => go(At::BitmapName { flags }),
        (At::BitmapNode { flags }, _) => {
            let skip = u64::from(gather.field(feed, 1)?[0]);
            Step::Go { at: At::BitmapName { flags }, skip }
        }
        (At::BitmapName { flags }, _) if flags & BITMAP_NAME == 0 => go(At::BitmapBody { flags }),
        (At::BitmapName { flags }, _) => {
            let skip = u64::from(gather.field(feed, 1)?[0]);
            Step::Go { at: At::BitmapBody { flags }, skip }
        }
        (At::BitmapBody { flags }, _) => {
            match flags & (BITMAP_START | BITMAP_COMPLETE | BITMAP_BITS) {
                // u32 granularity, u8 flags.
                BITMAP_START => Step::Go { at: At::Record, skip: 5 },
                BITMAP_COMPLETE => go(At::Record),
                // u64 first sector, u32 sectors.
                BITMAP_BITS if flags & BITMAP_ZEROES != 0 => Step::Go { at: At::Record, skip: 12 },
                BITMAP_BITS => Step::Go { at: At::DataLen, skip: 12 },
                _ => Step::Surprise,
            }
        }
        (At::DataLen, _) => match be64(gather.field(feed, 8)?) {
            skip @ 0..=MAX_DATA => Step::Go { at: At::Record, skip },
            _ => Step::Surprise,
        },
        (At::Record, Handler::Vfio) => match be64(gather.field(feed, 8)?) {
            VFIO_SETUP => go(At::Record),
            VFIO_DATA => go(At::DataLen),
            VFIO_END | VFIO_INIT_DATA_SENT => Step::End,
            _ => Step::Surprise,
        },
        (At::Record, Handler::Block) => {
            let flags = be64(gather.field(feed, 8)?) & BLOCK_FLAGS;
            match flags & !BLOCK_ZERO {
                BLOCK_DEVICE => go(At::BlockName { zero: flags & BLOCK_ZERO != 0 }),
                BLOCK_EOS => Step::End,
                BLOCK_PROGRESS => go(At::Record),
                _ => Step::Surprise,
            }
        }
        (At::BlockName { zero }, _) => {
            let skip = u64::from(gather.field(feed, 1)?[0]);
            Step::Go { at: if zero { At::Record } else { At::BlockData }, skip }
        }
        (At::BlockData, _) => Step::Go { at: At::Record, skip: BLOCK_LEN },
    })
}
