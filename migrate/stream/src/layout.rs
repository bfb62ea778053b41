//! Sizes common to all of QEMU's stream: pages, and the headers of multifd packets.

/// Smallest target page QEMU has (ARM); the flag bits of a RAM record need this much room.
pub(crate) const MIN_PAGE_SIZE: usize = 1 << 10;
/// Largest target page supported.
pub(crate) const MAX_PAGE_SIZE: usize = 1 << 16;
/// Page bytes that fill one multifd packet; fixed in QEMU, so it gives the header's length.
pub(crate) const MULTIFD_PACKET_SIZE: usize = 512 * 1024;

/// Whether this crate supports streams of such pages: a power of two, 1 KiB to 64 KiB.
pub(crate) const fn is_page_size(size: usize) -> bool {
    size.is_power_of_two() && size >= MIN_PAGE_SIZE && size <= MAX_PAGE_SIZE
}

/// Length on the wire of every multifd RAM packet header for pages of `page_size` bytes.
pub const fn multifd_header_len(page_size: usize) -> usize {
    MULTIFD_FIXED_LEN + 8 * (MULTIFD_PACKET_SIZE / page_size)
}

/// Bytes before the offsets of a multifd RAM packet header.
pub(crate) const MULTIFD_FIXED_LEN: usize = 320;
