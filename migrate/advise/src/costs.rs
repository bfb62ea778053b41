//! CPU time besides coding, for the methods of platen and of QEMU.
//!
//! The figures were measured on the machine of docs/figures.md. They are scaled by the time that a
//! host takes for zstd 1 on the built-in pages. That is an assumption, and the largest one of the
//! model where cores are the bottleneck.

use forecast::Work;

/// CPU time of zstd 1 for a byte of the built-in pages on that machine, ns.
const REFERENCE: f64 = 2.6;
/// A host is no more than this many times slower or faster than that machine.
const RANGE: (f64, f64) = (0.25, 8.0);

/// CPU time, ns a byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Costs {
    /// platen: QEMU, and the relay, at the source and at the destination.
    pub(crate) platen: [Work; 2],
    /// QEMU alone.
    pub(crate) qemu: [Work; 2],
    /// CPU time of QEMU's zlib 1, to encode and to decode, over that of platen's zstd 1.
    pub(crate) zlib: [f64; 2],
    /// Bytes of pages per second that one thread of QEMU writes.
    pub(crate) source: f64,
    /// Bytes of pages per second that QEMU recognises as zeros.
    pub(crate) zeros: f64,
    /// CPU time of the destination QEMU for each byte of pages that are zeros, ns.
    pub(crate) zeros_there: f64,
}

impl Costs {
    /// The costs on a host that takes `reference` ns for a byte of the built-in pages with zstd 1.
    pub(crate) fn of(reference: f64) -> Self {
        let slow = (reference / REFERENCE).clamp(RANGE.0, RANGE.1);
        let work = |page: f64, wire: f64| Work { page: page * slow, wire: wire * slow };
        Self {
            // Uncompressed, QEMU alone took 0.90 CPU seconds at both ends for 839 MB, and for
            // 419 MB of zeros.
            qemu: [work(0.14, 0.25), work(0.18, 0.25)],
            // 0.75 CPU seconds a GiB in both relays without TLS, and QEMU's part.
            platen: [work(0.6, 0.25), work(0.65, 0.25)],
            zlib: [3.5, 2.5],
            // 0.69 s without a limit of the link.
            source: 1.5e9 / slow,
            zeros: 4e9 / slow,
            zeros_there: 0.25 * slow,
        }
    }
}
