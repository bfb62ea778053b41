//! Counters of a relay, named as in QEMU where QEMU has them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one end of one migration. They change once per chunk. All are plain totals, so
/// `Relaxed` is enough.
#[derive(Debug, Default)]
pub struct Counters {
    /// Plain bytes read from the source QEMU, or written to the destination's.
    pub plain: AtomicU64,
    /// Bytes of the VM's RAM; 0 until the stream has stated it.
    pub ram: AtomicU64,
    /// Non-zero pages seen in the stream.
    pub normal: AtomicU64,
    /// Zero pages seen in the stream.
    pub duplicate: AtomicU64,
    /// Guest pages in chunks that were compressed.
    pub compressed_pages: AtomicU64,
    /// Plain bytes of those chunks.
    pub compressed_plain: AtomicU64,
    /// Bytes sent for those chunks.
    pub compressed_size: AtomicU64,
    /// Chunks sent as parts of histories (W29a).
    pub history_parts: AtomicU64,
    /// Pages stored in the delta cache.
    pub delta_stored: AtomicU64,
    /// Of these, the pages sent as a difference.
    pub delta_pages: AtomicU64,
    /// Pages of its seed that the destination has offered (W29b).
    pub seed_offered: AtomicU64,
    /// Pages not sent because the destination has them in its seed .
    pub seed_pages: AtomicU64,
    /// Plain bytes of chunks sent raw.
    pub raw_bytes: AtomicU64,
}

impl Counters {
    /// Records the size of the RAM, from a stream that states it: only the main stream does.
    pub(crate) fn ram_is(&self, bytes: u64) {
        self.ram.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Bytes of RAM in the pages seen so far. A page that was seen twice counts twice.
    pub fn ram_seen(&self, page_size: u32) -> u64 {
        let seen = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (seen(&self.normal) + seen(&self.duplicate)).saturating_mul(page_size.into())
    }

    /// Whether more pages were seen than the RAM has.
    pub(crate) fn sends_again(&self, page_size: u32) -> bool {
        let ram = self.ram.load(Ordering::Relaxed);
        ram > 0 && self.ram_seen(page_size) > ram
    }

    pub(crate) fn compressed(&self, pages: u64, plain: usize, size: usize) {
        self.compressed_pages.fetch_add(pages, Ordering::Relaxed);
        self.compressed_plain.fetch_add(plain as u64, Ordering::Relaxed);
        self.compressed_size.fetch_add(size as u64, Ordering::Relaxed);
    }

    pub(crate) fn deltas(&self, counts: delta::Counts) {
        self.delta_stored.fetch_add(counts.stored, Ordering::Relaxed);
        self.delta_pages.fetch_add(counts.deltas, Ordering::Relaxed);
        self.seed_pages.fetch_add(counts.seeded, Ordering::Relaxed);
    }

    pub(crate) fn raw(&self, plain: usize) {
        self.raw_bytes.fetch_add(plain as u64, Ordering::Relaxed);
    }
}
