//! The driver's ABI: numbers and structs of `linux/ublk_cmd.h`, written from the kernel's
//! documentation, and compared with the header by a test where the header is installed.
//!
//! This module has only the parts that are used. Numbers newer than Linux 6.1 are marked.

use std::mem::{offset_of, size_of};

/// The driver's control device.
pub(crate) const CONTROL: &str = "/dev/ublk-control";

/// Bytes of a sector, the unit of lengths and offsets.
pub(crate) const SECTOR: u64 = 512;

/// The most requests in flight of a queue; it also spaces the queues' descriptors in the mapping.
pub(crate) const MAX_DEPTH: u16 = 4096;

/// The most queues of a device.
pub(crate) const MAX_QUEUES: u16 = 4096;

/// A control command's number in its first encoding, the only one before Linux 6.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Command {
    /// Get the driver's description of a device.
    DeviceInfo = 0x02,
    /// Add a device; for -1 the driver chooses the number.
    Add = 0x04,
    /// Delete a stopped device.
    Delete = 0x05,
    /// Start the disk; answered when every queue has fetched all its tags.
    Start = 0x06,
    /// Stop the disk; answered when nothing has it open.
    Stop = 0x07,
    /// Set size and limits, before the start.
    SetParameters = 0x08,
    /// Get size and limits.
    GetParameters = 0x09,
    /// Announce a new server.
    StartRecovery = 0x10,
    /// End recovery: the new server has fetched all tags, and requests flow again.
    EndRecovery = 0x11,
    /// Get the driver's feature flags (6.5).
    Features = 0x13,
    /// Change the size of a disk, in sectors (6.16).
    UpdateSize = 0x15,
}

impl Command {
    /// The number in ioctl encoding, which Linux 6.4 and later want.
    pub(crate) const fn ioctl(self) -> u32 {
        // The commands that only read have only that direction bit.
        let direction = match self {
            Self::DeviceInfo | Self::GetParameters | Self::Features => READ,
            _ => READ | WRITE,
        };
        ioctl(direction, self as u8, size_of::<ControlCommand>())
    }
}

/// Fetch this tag's next request.
pub(crate) const FETCH: u8 = 0x20;
/// Commit this tag's request, and fetch the next.
pub(crate) const COMMIT_AND_FETCH: u8 = 0x21;

/// A tag command's number in ioctl encoding.
pub(crate) const fn io_ioctl(number: u8) -> u32 {
    ioctl(READ | WRITE, number, size_of::<IoCommand>())
}

const WRITE: u32 = 1;
const READ: u32 = 2;

const fn ioctl(direction: u32, number: u8, size: usize) -> u32 {
    assert!(size < 1 << 14);
    #[expect(clippy::cast_possible_truncation, reason = "below 2^14")]
    let size = size as u32;
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number as u32
}

/// The result of a fetch whose tag will get no more requests.
pub(crate) const ABORT: i32 = -19;

/// Device flag: the disk survives a dead server.
pub(crate) const USER_RECOVERY: u64 = 1 << 3;
/// Device flag: a dead server's requests are issued again to the next server.
pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Device flag, set by the driver: commands are encoded as ioctls (6.4).
pub(crate) const CMD_IOCTL_ENCODE: u64 = 1 << 6;

/// Feature of the driver: requests without copies (6.15).
pub(crate) const ZERO_COPY: u64 = 1 << 0;
/// Feature of the driver: it has [`Command::UpdateSize`] (6.16).
pub(crate) const UPDATE_SIZE: u64 = 1 << 10;

/// Device state: neither disk nor server.
pub(crate) const DEAD: u16 = 0;
/// Device state: a disk and a server.
pub(crate) const LIVE: u16 = 1;
/// Device state: a disk without a server.
pub(crate) const QUIESCED: u16 = 2;

/// A control command, in an entry of 128 bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct ControlCommand {
    pub(crate) dev_id: u32,
    /// `u16::MAX` for no queue.
    pub(crate) queue_id: u16,
    /// Length of the buffer at `addr`.
    pub(crate) len: u16,
    pub(crate) addr: u64,
    pub(crate) data: u64,
    pub(crate) dev_path_len: u16,
    pub(crate) pad: u16,
    pub(crate) reserved: u32,
}

impl ControlCommand {
    /// The bytes in the ring's entry.
    pub(crate) fn to_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.dev_id.to_ne_bytes());
        put(&self.queue_id.to_ne_bytes());
        put(&self.len.to_ne_bytes());
        put(&self.addr.to_ne_bytes());
        put(&self.data.to_ne_bytes());
        put(&self.dev_path_len.to_ne_bytes());
        put(&self.pad.to_ne_bytes());
        put(&self.reserved.to_ne_bytes());
        bytes
    }
}

/// The driver's description of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DeviceInfo {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) state: u16,
    pub(crate) pad0: u16,
    pub(crate) max_io: u32,
    pub(crate) id: u32,
    pub(crate) pid: i32,
    pub(crate) pad1: u32,
    pub(crate) flags: u64,
    /// For the server's use; the driver only stores it.
    pub(crate) server_flags: u64,
    pub(crate) owner: [u32; 2],
    pub(crate) reserved: [u64; 2],
}

/// Size and limits of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Parameters {
    /// Length of this struct in bytes; a driver with a longer one takes the rest as zeros.
    pub(crate) len: u32,
    /// The valid parts: bit 0 basic, bit 1 discard.
    pub(crate) types: u32,
    pub(crate) attributes: u32,
    pub(crate) logical_shift: u8,
    pub(crate) physical_shift: u8,
    pub(crate) io_opt_shift: u8,
    pub(crate) io_min_shift: u8,
    pub(crate) max_sectors: u32,
    pub(crate) chunk_sectors: u32,
    pub(crate) sectors: u64,
    pub(crate) virt_boundary_mask: u64,
    pub(crate) discard_alignment: u32,
    pub(crate) discard_granularity: u32,
    pub(crate) max_discard_sectors: u32,
    pub(crate) max_write_zeroes_sectors: u32,
    pub(crate) max_discard_segments: u16,
    pub(crate) reserved: u16,
    /// Pads the struct to a multiple of 8.
    pub(crate) pad: u32,
}

impl Parameters {
    pub(crate) const BASIC: u32 = 1;
    pub(crate) const DISCARD: u32 = 2;
}

/// A request's descriptor, in memory that the driver writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IoDescriptor {
    /// Bits 0 to 7 the operation, the others flags.
    pub(crate) op_flags: u32,
    pub(crate) sectors: u32,
    pub(crate) start: u64,
    pub(crate) addr: u64,
}

pub(crate) const OP_READ: u8 = 0;
pub(crate) const OP_WRITE: u8 = 1;
pub(crate) const OP_FLUSH: u8 = 2;
pub(crate) const OP_DISCARD: u8 = 3;
pub(crate) const OP_WRITE_ZEROES: u8 = 5;

/// A tag's command, in a ring's entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IoCommand {
    pub(crate) queue: u16,
    pub(crate) tag: u16,
    /// Bytes done, or a negative errno.
    pub(crate) result: i32,
    /// The buffer of the tag's next request.
    pub(crate) addr: u64,
}

impl IoCommand {
    /// The bytes in the ring's entry.
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes
    }
}

// The driver accesses these by offset, so a wrong offset is a wrong device.
const _: () = {
    assert!(size_of::<ControlCommand>() == 32);
    assert!(offset_of!(ControlCommand, addr) == 8 && offset_of!(ControlCommand, data) == 16);
    assert!(size_of::<DeviceInfo>() == 64);
    assert!(offset_of!(DeviceInfo, max_io) == 8 && offset_of!(DeviceInfo, pid) == 16);
    assert!(offset_of!(DeviceInfo, flags) == 24 && offset_of!(DeviceInfo, owner) == 40);
    assert!(size_of::<Parameters>() == 64);
    assert!(offset_of!(Parameters, attributes) == 8 && offset_of!(Parameters, sectors) == 24);
    assert!(offset_of!(Parameters, discard_alignment) == 40);
    assert!(offset_of!(Parameters, max_discard_segments) == 56);
    assert!(size_of::<IoDescriptor>() == 24 && offset_of!(IoDescriptor, start) == 8);
    assert!(size_of::<IoCommand>() == 16 && offset_of!(IoCommand, addr) == 8);
    assert!(Command::Add.ioctl() == 0xc020_7504 && Command::DeviceInfo.ioctl() == 0x8020_7502);
    assert!(Command::GetParameters.ioctl() == 0x8020_7509);
    assert!(Command::UpdateSize.ioctl() == 0xc020_7515);
    assert!(io_ioctl(FETCH) == 0xc010_7520 && io_ioctl(COMMIT_AND_FETCH) == 0xc010_7521);
};

#[cfg(test)]
mod tests;
