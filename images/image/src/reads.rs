//! The reads of images that have not returned, for a watch: a disk may not answer.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A read of an image on this host, or of a pack of it, that has not returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Number of the read among those of this process.
    pub number: u64,
    /// Path of the image.
    pub image: Arc<Path>,
    /// The part that is read.
    pub part: ReadPart,
    /// The thread that reads, as in `/proc/self/task`.
    pub thread: u32,
}

/// The part of an image that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadPart {
    /// All that is read when the image is opened.
    Opening,
    /// The hot set beside the image.
    HotSet,
    /// The stored bytes of a unit.
    Unit {
        /// Number of the unit in its file.
        unit: u64,
        /// Offset of the first byte in that file.
        offset: u64,
        /// Name of the file, if it is a pack.
        pack: Option<u128>,
    },
}

impl fmt::Display for ReadPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opening => f.write_str("its header or index"),
            Self::HotSet => f.write_str("its hot set"),
            Self::Unit { unit, offset, pack: None } => write!(f, "unit {unit} at byte {offset}"),
            Self::Unit { unit, offset, pack: Some(pack) } => {
                write!(f, "unit {unit} at byte {offset} of pack {pack:032x}")
            }
        }
    }
}

/// One entry for each thread that reads.
struct Reads {
    next: u64,
    now: Vec<Reading>,
}

static READS: Mutex<Reads> = Mutex::new(Reads { next: 0, now: Vec::new() });

/// The reads that have not returned, the oldest first.
pub fn readings() -> Vec<Reading> {
    reads().now.clone()
}

/// Lists a read until it is dropped.
pub(crate) struct Listed(u64);

impl Listed {
    pub(crate) fn new(image: &Arc<Path>, part: ReadPart) -> Self {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let mut reads = reads();
        let number = reads.next;
        reads.next += 1;
        reads.now.push(Reading { number, image: Arc::clone(image), part, thread });
        Self(number)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        reads().now.retain(|reading| reading.number != self.0);
    }
}

fn reads() -> MutexGuard<'static, Reads> {
    READS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_listed_until_it_returns() {
        let path: Arc<Path> = Path::new("/the/image of this test").into();
        let here = || -> Vec<Reading> {
            readings().into_iter().filter(|reading| reading.image == path).collect()
        };
        let unit = ReadPart::Unit { unit: 3, offset: 4096, pack: Some(0xabc) };
        let first = Listed::new(&path, ReadPart::Opening);
        let second = Listed::new(&path, unit);
        let parts: Vec<String> = here().iter().map(|reading| reading.part.to_string()).collect();
        let named = "unit 3 at byte 4096 of pack 00000000000000000000000000000abc";
        assert_eq!(parts, ["its header or index", named]);
        assert!(here()[0].number < here()[1].number);
        drop(first);
        assert_eq!(here()[0].part, unit);
        drop(second);
        assert_eq!(here(), []);
    }
}
