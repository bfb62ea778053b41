//! The bytes of a control command: structs of the kernel, field by field.

use std::mem::offset_of;

use crate::sys::{DeviceInfo, Parameters};

/// A command's input and output buffer, large enough for all commands.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct Payload(pub(crate) [u8; 64]);

const _: () = assert!(
    size_of::<DeviceInfo>() <= size_of::<Payload>()
        && size_of::<Parameters>() <= size_of::<Payload>()
);

impl Payload {
    /// Zeros, for commands whose answer is read, or none.
    pub(crate) fn new() -> Self {
        Self([0; 64])
    }

    /// A description of a device, as a command sends it.
    pub(crate) fn of_info(info: &DeviceInfo) -> Self {
        let mut out = Fields::default();
        out.put(&info.queues.to_ne_bytes());
        out.put(&info.depth.to_ne_bytes());
        out.put(&info.state.to_ne_bytes());
        out.put(&info.pad0.to_ne_bytes());
        out.put(&info.max_io.to_ne_bytes());
        out.put(&info.id.to_ne_bytes());
        out.put(&info.pid.to_ne_bytes());
        out.put(&info.pad1.to_ne_bytes());
        out.put(&info.flags.to_ne_bytes());
        out.put(&info.server_flags.to_ne_bytes());
        out.bytes
    }

    /// The description of a device that the kernel returned.
    pub(crate) fn to_info(self) -> DeviceInfo {
        let short = |at: usize| u16::from_ne_bytes([self.0[at], self.0[at + 1]]);
        let word = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&self.0[at..at + 4]);
            u32::from_ne_bytes(bytes)
        };
        let long = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&self.0[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        DeviceInfo {
            queues: short(0),
            depth: short(2),
            state: short(4),
            max_io: word(8),
            id: word(12),
            pid: i32::from_ne_bytes(word(16).to_ne_bytes()),
            flags: long(24),
            server_flags: long(32),
            owner: [word(40), word(44)],
            ..DeviceInfo::default()
        }
    }

    /// Parameters of a disk, as a command sends them.
    pub(crate) fn of_parameters(p: &Parameters) -> Self {
        let mut out = Fields::default();
        out.put(&p.len.to_ne_bytes());
        out.put(&p.types.to_ne_bytes());
        out.put(&p.attributes.to_ne_bytes());
        out.put(&[p.logical_shift, p.physical_shift, p.io_opt_shift, p.io_min_shift]);
        out.put(&p.max_sectors.to_ne_bytes());
        out.put(&p.chunk_sectors.to_ne_bytes());
        out.put(&p.sectors.to_ne_bytes());
        out.put(&p.virt_boundary_mask.to_ne_bytes());
        out.put(&p.discard_alignment.to_ne_bytes());
        out.put(&p.discard_granularity.to_ne_bytes());
        out.put(&p.max_discard_sectors.to_ne_bytes());
        out.put(&p.max_write_zeroes_sectors.to_ne_bytes());
        out.put(&p.max_discard_segments.to_ne_bytes());
        out.put(&p.reserved.to_ne_bytes());
        out.bytes
    }

    /// The size in the parameters that the kernel returned, in sectors.
    pub(crate) fn sectors(self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[offset_of!(Parameters, sectors)..][..8]);
        u64::from_ne_bytes(bytes)
    }
}

/// Writes fields one after the other.
struct Fields {
    bytes: Payload,
    at: usize,
}

impl Default for Fields {
    fn default() -> Self {
        Self { bytes: Payload::new(), at: 0 }
    }
}

impl Fields {
    fn put(&mut self, field: &[u8]) {
        self.bytes.0[self.at..self.at + field.len()].copy_from_slice(field);
        self.at += field.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_s_description_has_the_offsets_of_the_struct() {
        let ask = DeviceInfo {
            queues: 0x0102,
            depth: 0x0304,
            max_io: 0x0506_0708,
            id: u32::MAX,
            pid: 77,
            flags: 0x1122_3344_5566_7788,
            ..DeviceInfo::default()
        };
        let payload = Payload::of_info(&ask);
        assert_eq!(payload.0[offset_of!(DeviceInfo, max_io)], 0x08);
        assert_eq!(payload.0[offset_of!(DeviceInfo, pid)], 77);
        assert_eq!(payload.0[offset_of!(DeviceInfo, flags)], 0x88);
        assert_eq!(payload.to_info(), ask);
    }
}
