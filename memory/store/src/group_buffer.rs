//! The bytes of a group: a header that names its pages, and their payload.

use crate::entry::{MAX_MEMBERS, MAX_OBJECT};
use crate::record::PIECES;

/// Bytes before a group's payload: the number of pages (1), the first page's index (5), the total
/// length (2), and the distance from each page to the next. The total length detects a missing
/// object: an object's checksum covers that object alone.
pub(crate) const HEADER: usize = 8 + MAX_MEMBERS;

/// The most bytes of a group's payload.
pub const MAX_PAYLOAD: usize = PIECES * MAX_OBJECT - HEADER;

/// The largest distance between neighbouring pages of a group.
pub const MAX_GAP: u64 = 255;

/// A page as it was read, to be stored in another form unless it was written since.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen<'a> {
    /// The page.
    pub index: u64,
    /// Its object's tag.
    pub tag: u8,
    /// Its object's bytes.
    pub bytes: &'a [u8],
}

/// The bytes of one group, cached for the next of its pages.
pub struct GroupBuffer {
    pub(crate) bytes: Box<[u8; PIECES * MAX_OBJECT]>,
    pub(crate) len: usize,
    pub(crate) tag: u8,
    /// Number and stamp of the group.
    pub(crate) group: Option<(u32, u64)>,
}

impl GroupBuffer {
    /// An empty buffer of 28 KiB.
    pub fn new() -> Self {
        let bytes = vec![0; PIECES * MAX_OBJECT].into_boxed_slice();
        let bytes = bytes.try_into().unwrap_or_else(|_| unreachable!("as many as it has"));
        Self { bytes, len: 0, tag: 0, group: None }
    }

    /// The group's payload; empty before a group was read.
    pub fn payload(&self) -> &[u8] {
        self.bytes.get(HEADER..self.len).unwrap_or(&[])
    }

    /// Space for the payload of a new group; the buffer's old group is lost.
    pub fn room(&mut self) -> &mut [u8] {
        self.group = None;
        &mut self.bytes[HEADER..]
    }

    /// Empties the buffer.
    pub fn clear(&mut self) {
        self.group = None;
        self.len = 0;
    }

    /// Number and stamp of the buffered group.
    pub(crate) fn place(&self) -> Option<(u32, u64)> {
        self.group
    }

    /// The number of pages, and the index of the one at `position`.
    pub(crate) fn member(&self, position: u32) -> Option<(usize, u64)> {
        let head = self.bytes.first_chunk::<8>().filter(|_| self.len > HEADER)?;
        let [count, a, b, c, d, e, low, high] = *head;
        if usize::from(u16::from_le_bytes([low, high])) != self.len {
            return None;
        }
        let (count, number) = (usize::from(count), [a, b, c, d, e, 0, 0, 0]);
        let position = usize::try_from(position).ok().filter(|&at| at < count)?;
        let gaps = self.bytes.get(8..8 + position)?;
        let index = gaps.iter().fold(u64::from_le_bytes(number), |sum, &gap| sum + u64::from(gap));
        (count <= MAX_MEMBERS).then_some((count, index))
    }

    /// Writes the header for a payload of `len` bytes; `None` if these pages cannot be a group.
    pub(crate) fn write_header(&mut self, members: &[Seen<'_>], len: usize) -> Option<()> {
        let header = &mut self.bytes[..HEADER];
        header.fill(0);
        let first = members.first()?.index.to_le_bytes();
        header[0] = u8::try_from(members.len()).ok()?;
        header[1..6].copy_from_slice(&first[..5]);
        header[6..8].copy_from_slice(&u16::try_from(HEADER + len).ok()?.to_le_bytes());
        if first[5..] != [0; 3] || members.len() > MAX_MEMBERS {
            return None;
        }
        for (gap, two) in header[8..].iter_mut().zip(members.windows(2)) {
            let ahead = two[1].index.checked_sub(two[0].index)?;
            *gap = u8::try_from(ahead).ok().filter(|&ahead| ahead > 0)?;
        }
        Some(())
    }
}

impl Default for GroupBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for GroupBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { len, tag, group, .. } = self;
        f.debug_struct("GroupBuffer")
            .field("group", group)
            .field("tag", tag)
            .field("len", len)
            .finish_non_exhaustive()
    }
}
