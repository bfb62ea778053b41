//! Resumes parsing in a main channel whose bytes stopped being understood before RAM ended.

use crate::cursor::{be32, Feed};

/// The start of a RAM section body, behind the pattern found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Behind `01 id 03 "ram" 0 4`; searched for while the RAM section's id is unknown.
    Start { id: u32 },
    /// Behind a footer and `02 id` (or `03 id`, the END section) of the known RAM section.
    Section { end: bool },
}

const PART_LEN: usize = 10;
const START_LEN: usize = 17;
/// The most bytes of one feed that the start of a pattern can occupy; the next feed completes it.
const KEEP: usize = START_LEN - 1;

/// A scan for the start of a RAM section; its state is the last few bytes seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scan {
    kept: [u8; KEEP],
    len: usize,
}

impl Scan {
    /// Reads until behind a match, or to the end of the feed. `ram` is the RAM section's id, once
    /// known.
    pub(crate) fn run(&mut self, feed: &mut Feed<'_>, ram: Option<u32>) -> Option<Found> {
        let rest = feed.rest();
        // For a match that began in an earlier feed: the stored bytes and the first few new ones.
        let mut joint = [0; 2 * KEEP];
        let fresh = rest.len().min(KEEP);
        joint[..self.len].copy_from_slice(&self.kept[..self.len]);
        joint[self.len..self.len + fresh].copy_from_slice(&rest[..fresh]);
        let joint = &joint[..self.len + fresh];
        if let Some((at, len, found)) = find(joint, ram).filter(|&(at, ..)| at < self.len) {
            // The match ends in the new bytes: otherwise the last feed would have found it.
            feed.advance((at + len).saturating_sub(self.len));
            return Some(found);
        }
        if let Some((at, len, found)) = find(rest, ram) {
            feed.advance(at + len);
            return Some(found);
        }
        let tail = if rest.len() >= KEEP { rest } else { joint };
        let tail = &tail[tail.len().saturating_sub(KEEP)..];
        self.kept[..tail.len()].copy_from_slice(tail);
        self.len = tail.len();
        feed.advance(rest.len());
        None
    }
}

/// The first match that is complete in `bytes`: its offset, its length, its kind.
fn find(bytes: &[u8], ram: Option<u32>) -> Option<(usize, usize, Found)> {
    let mut at = 0;
    loop {
        at += bytes[at..].iter().position(|&b| b == 0x7e || b == 0x01)?;
        let here = &bytes[at..];
        if here[0] == 0x7e && here.len() >= PART_LEN && matches!(here[5], 0x02 | 0x03) {
            if Some(be32(here, 6)) == ram {
                return Some((at, PART_LEN, Found::Section { end: here[5] == 0x03 }));
            }
        } else if here[0] == 0x01
            && ram.is_none()
            && here.len() >= START_LEN
            && here[5..START_LEN] == *b"\x03ram\0\0\0\0\0\0\0\x04"
        {
            return Some((at, START_LEN, Found::Start { id: be32(here, 1) }));
        }
        at += 1;
    }
}
