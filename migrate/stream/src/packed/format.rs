//! Constants of the packed form (`PACKED.md`).

/// Most plain bytes in one packed chunk.
pub const MAX_CHUNK: usize = 1 << 20;

/// First byte of a packed chunk; other formats have other numbers.
pub(crate) const FORMAT: u8 = 1;
/// `format, log2 page size, 0, 0, structure length (u32), literals length (u32)`, big-endian.
pub(crate) const HEAD_LEN: usize = 12;

/// Operation numbers: the low three bits of an operation's first varint.
pub(crate) mod op {
    /// The next `n` bytes of the literals.
    pub(crate) const LITERAL: u64 = 0;
    /// `n` page records, bodies in the bodies; then the address step.
    pub(crate) const PAGES: u64 = 1;
    /// `n` page records filled with one word; then the address step and the word.
    pub(crate) const FILLED_PAGES: u64 = 2;
    /// `n` bare bodies.
    pub(crate) const BODIES: u64 = 3;
    /// `n` bare bodies filled with one word; then the word.
    pub(crate) const FILLED_BODIES: u64 = 4;
    /// `n` zero records; then the address step.
    pub(crate) const ZEROS: u64 = 5;
    /// A multifd header in `n` bytes of code, which follow.
    pub(crate) const HEADER: u64 = 6;
    /// A multifd header as literals (`n` is 1); later headers may refer to it.
    pub(crate) const LITERAL_HEADER: u64 = 7;
}
