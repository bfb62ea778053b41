//! Options of an engine.

use crate::piece::MAX_PIECE;
use std::time::Duration;

/// Options of an engine. Values out of range are clamped.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Deflate level of device and software, 1 to 9. Default 1.
    pub level: u32,
    /// The most requests in flight, 1 to 256. Default 128; the device's ring holds 511.
    pub depth: usize,
    /// The most plain bytes of a piece, 1 to 64 KiB. Default 64 KiB. A slot takes somewhat more
    /// than twice that.
    pub max_plain: usize,
    /// The longest wait of a piece for the device, 1 ms to 60 s. Default 100 ms.
    pub deadline: Duration,
    /// The session's directions. Default both.
    pub direction: Direction,
    /// Whether to do pieces in software while the device is full, if that is faster. Default true.
    pub share: bool,
    /// How often to verify: every n-th compressed output of the device is decompressed and
    /// compared; 1 for all, 0 for none. Default 64.
    ///
    /// The device checks itself (compress-and-verify), and its checksum of the plain bytes is
    /// always compared. This finds errors after that, for about 4 µs a page.
    pub verify_every: u32,
    /// Whether to look for an instance now and then, if there is none or the current one has been
    /// unusable for a second. The search allocates, also pinned memory; nothing else in a `poll`
    /// allocates. Default true.
    pub roam: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            level: 1,
            depth: 128,
            max_plain: MAX_PIECE,
            deadline: Duration::from_millis(100),
            direction: Direction::Both,
            share: true,
            verify_every: 64,
            roam: true,
        }
    }
}

impl EngineOptions {
    pub(crate) fn in_range(mut self) -> Self {
        self.level = self.level.clamp(1, 9);
        self.depth = self.depth.clamp(1, 256);
        self.max_plain = self.max_plain.clamp(1, MAX_PIECE);
        self.deadline = self.deadline.clamp(Duration::from_millis(1), Duration::from_secs(60));
        self
    }

    /// Bytes of a slot's source and destination: the expansion of deflate (stored blocks, the
    /// device's 9-bit literals) and a margin above the device's least destination.
    pub(crate) fn room(&self) -> usize {
        (self.max_plain + self.max_plain / 8 + 1024).next_multiple_of(64)
    }
}

/// The directions for which a session is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Both directions.
    Both,
    /// Compression only.
    Compress,
    /// Decompression only.
    Decompress,
}
