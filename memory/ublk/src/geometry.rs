//! The geometry of a device: its size, queues and limits, as wanted and as the driver describes it.

use crate::sys::{self, DeviceInfo, Parameters};

/// The parameters of a new device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the disk in bytes: a multiple of 4096.
    pub size: u64,
    /// The number of queues, each with a thread.
    pub queues: u16,
    /// Requests in flight of a queue.
    pub depth: u16,
    /// The most bytes of a request: a multiple of 4096.
    pub max_io: u32,
}

/// The state of a device's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// The disk was not started, or is stopped.
    Dead,
    /// The disk has a server.
    Live,
    /// The disk's server is gone; requests wait for the next one.
    Quiesced,
    /// A state of later kernels.
    Other(u16),
}

/// The driver's description of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// The device's number: `/dev/ublkb0` is 0.
    pub id: u32,
    /// The number of queues that the driver has made, at most as many as requested.
    pub queues: u16,
    /// Requests in flight of a queue.
    pub depth: u16,
    /// The most bytes of a request.
    pub max_io: u32,
    /// The state of the device's disk.
    pub state: DiskState,
    /// The process id of the device's server.
    pub pid: i32,
    /// The [`mark`](crate::Owner::mark) of the device; 0 if it has none.
    pub mark: u64,
}

impl From<DeviceInfo> for Info {
    fn from(info: DeviceInfo) -> Self {
        let state = match info.state {
            sys::DEAD => DiskState::Dead,
            sys::LIVE => DiskState::Live,
            sys::QUIESCED => DiskState::Quiesced,
            other => DiskState::Other(other),
        };
        let DeviceInfo { queues, depth, max_io, id, pid, server_flags: mark, .. } = info;
        Self { id, queues, depth, max_io, state, pid, mark }
    }
}

/// The disk's parameters.
pub(crate) fn parameters(geometry: &Geometry) -> Parameters {
    const PAGE_SHIFT: u8 = 12;
    let sectors = geometry.size / sys::SECTOR;
    // A discard has no data and costs little for each page. But a discard of the whole disk must
    // not occupy a tag for seconds, so it is limited to 256 MiB.
    let discard = u32::try_from(sectors).unwrap_or(u32::MAX).min(1 << 19);
    Parameters {
        len: 64,
        types: Parameters::BASIC | Parameters::DISCARD,
        // Non-rotational, so that swap allocates clusters for each CPU, and without a volatile
        // cache, so that no flush is needed.
        attributes: 0,
        logical_shift: PAGE_SHIFT,
        physical_shift: PAGE_SHIFT,
        io_opt_shift: PAGE_SHIFT,
        io_min_shift: PAGE_SHIFT,
        max_sectors: geometry.max_io >> 9,
        sectors,
        discard_granularity: 1 << PAGE_SHIFT,
        max_discard_sectors: discard,
        max_write_zeroes_sectors: discard,
        max_discard_segments: 1,
        ..Parameters::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Payload;
    use std::mem::offset_of;

    #[test]
    fn parameters_have_the_offsets_of_the_struct() {
        let geometry = Geometry { size: 1 << 30, queues: 2, depth: 64, max_io: 512 << 10 };
        let p = parameters(&geometry);
        assert_eq!((p.sectors, p.max_sectors), (1 << 21, 1024));
        let bytes = Payload::of_parameters(&p).0;
        let at = |offset: usize| u32::from_ne_bytes(bytes[offset..offset + 4].try_into().unwrap());
        assert_eq!(at(offset_of!(Parameters, max_sectors)), 1024);
        assert_eq!(at(offset_of!(Parameters, sectors)), 1 << 21);
        assert_eq!(at(offset_of!(Parameters, discard_granularity)), 4096);
        assert_eq!(at(offset_of!(Parameters, max_write_zeroes_sectors)), 1 << 19);
        assert_eq!(bytes[offset_of!(Parameters, max_discard_segments)], 1);
        assert_eq!(Payload(bytes).sectors(), 1 << 21);
    }
}
