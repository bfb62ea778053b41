//! The end of a stream in postcopy.

/// Collects the last bytes of a stream in postcopy.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastBytes(Vec<u8>);

impl LastBytes {
    /// Adds `bytes` of the stream.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(&bytes[bytes.len().saturating_sub(LONGEST_END)..]);
        self.0.drain(..self.0.len().saturating_sub(LONGEST_END));
    }

    /// Whether the bytes so far end a stream.
    pub(crate) fn end_stream(&self) -> bool {
        ends_stream(&self.0)
    }
}

/// Bytes of the longest end that [`ends_stream`] looks for.
const LONGEST_END: usize = 14;

/// The end of RAM's last section (a record EOS, then a footer unless the machine has none), then
/// the end-of-stream tag. A page may end like that by chance, which only keeps the socket open.
pub(super) fn ends_stream(bytes: &[u8]) -> bool {
    const EOS: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0x10];
    const FOOTER: usize = 5;
    let Some((0, before)) = bytes.split_last() else { return false };
    let with_footer = before.len().checked_sub(FOOTER).is_some_and(|at| before[at] == 0x7e);
    // Fewer bytes than a section's end: its beginning was read before.
    before.len() < EOS.len() + FOOTER || with_footer || before.ends_with(&EOS)
}
