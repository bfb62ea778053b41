//! A device's settings, and the directives that set them.

/// A device's treatment of its source bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Real deflate.
    Deflate,
    /// Immediate stored blocks, so that only the cost of the software around the device remains.
    Stored,
}

/// The layout of pinned memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryMode {
    /// Whole pages for each allocation, with inaccessible pages around it; the device cannot access
    /// a byte more.
    Guard,
    /// 2-MiB slabs shared by allocations, as in the real libusdm: overruns hit neighbours.
    Slab,
}

/// The order in which completions are delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Completions come in any order.
    Shuffled,
    /// Completions come in the order of submission.
    Fifo,
}

/// A device's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Compression instances, 0 to [`MAX_INSTANCES`].
    pub instances: usize,
    /// Devices, over which the instances are spread round robin.
    pub packages: usize,
    /// The device's work.
    pub engine: Engine,
    /// Fixed part of a request's time, nanoseconds. `None`: 10 us for deflate (an assumption: no
    /// figure for 4 KiB is published), 0 for stored.
    pub latency_ns: Option<u64>,
    /// Throughput of one device in Gbit/s of plain bytes, 0 for no limit. `None`: 45 for deflate,
    /// the capacity that Linux states for a 4xxx (`ADF_4XXX_RL_MAX_TP_DC`, dynamic deflate, level
    /// 1), no limit for stored.
    pub gbps: Option<u64>,
    /// Requests that a device executes at a time. 8 is an assumption, not a published figure.
    pub engines: usize,
    /// Entries of an instance's ring; at most one less is in flight. 512 in qatlib 24.02 and 26.08.
    pub ring: usize,
    /// Limit of pinned memory in bytes.
    pub usdm_bytes: Option<u64>,
    /// Layout of pinned memory.
    pub memory: MemoryMode,
    /// Order of completions.
    pub order: Order,
    /// Seed of all random choices.
    pub seed: u64,
    /// Intermediate buffers that `cpaDcStartInstance` needs: 0 on 4xxx and later, 12 to 64 on older
    /// devices.
    pub intermediate: u16,
    /// The value of `requiresPhysicallyContiguousMemory`.
    pub contiguous: bool,
    /// Whether the device is absent: `icp_sal_userIsQatAvailable` returns 0 and a start fails.
    pub absent: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            instances: 4,
            packages: 1,
            engine: Engine::Deflate,
            latency_ns: None,
            gbps: None,
            engines: 8,
            ring: qat_abi::RING_REQUESTS,
            usdm_bytes: None,
            memory: MemoryMode::Guard,
            order: Order::Shuffled,
            seed: 1,
            intermediate: 0,
            contiguous: true,
            absent: false,
        }
    }
}

/// The most instances: 64 is what one 4xxx has with all its VFs.
pub const MAX_INSTANCES: usize = 64;

/// One set-up directive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Setup {
    Instances(usize),
    Packages(usize),
    Engine(Engine),
    LatencyUs(u64),
    Gbps(u64),
    Engines(usize),
    Ring(usize),
    Usdm(u64),
    Memory(MemoryMode),
    Order(Order),
    Seed(u64),
    Intermediate(u16),
    Contiguous(bool),
    Absent,
}
