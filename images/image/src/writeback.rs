//! Starts to write a growing file to its disk, so that `fsync` finds little to do at the end.

#![expect(unsafe_code, reason = "the standard library and rustix have no sync_file_range")]

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};

use libc::SYNC_FILE_RANGE_WRITE;

use crate::apart;

/// Bytes by which the file grows between two requests: some hundred requests to the disk.
const PIECE: u64 = 8 << 20;

/// The requests for one file.
#[derive(Debug, Default)]
pub(crate) struct Writeback {
    /// Length of the file at the last request.
    at: u64,
    /// Ends of the ranges to write; none before the first request, or without a thread.
    ends: Option<SyncSender<u64>>,
}

impl Writeback {
    /// Takes note that `file` has `len` bytes now. Does not wait for the disk.
    pub(crate) fn grown(&mut self, file: &File, len: u64) {
        if len < self.at + PIECE {
            return;
        }
        if self.at == 0 {
            let (sender, ends) = sync_channel(1);
            let started = apart::start("writeback", file, move |fd| request(fd, &ends));
            // Without a thread the file is written at the end.
            self.ends = started.ok().map(|()| sender);
        }
        self.at = len;
        if let Some(ends) = &self.ends {
            // If the disk is slower than the writer, the next request covers this range, too.
            let _ = ends.try_send(len);
        }
    }
}

/// Requests ranges until the file is complete.
fn request(file: BorrowedFd<'_>, ends: &Receiver<u64>) {
    let mut begin = 0_u64;
    for end in ends {
        let (from, len) = (begin.cast_signed(), (end - begin).cast_signed());
        // fsync reports a failed write.
        // SAFETY: a call with numbers, and a file that is open.
        let _ =
            unsafe { libc::sync_file_range(file.as_raw_fd(), from, len, SYNC_FILE_RANGE_WRITE) };
        begin = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that hangs holds up no writer.
    #[test]
    fn a_thread_that_does_not_read_is_not_waited_for() {
        let file = tempfile::tempfile().unwrap();
        let (sender, ends) = sync_channel(1);
        let mut writeback = Writeback { at: 1, ends: Some(sender) };
        for nth in 1..=10 {
            writeback.grown(&file, nth * PIECE);
            writeback.grown(&file, nth * PIECE + 1);
        }
        assert_eq!(writeback.at, 10 * PIECE + 1);
        drop(writeback);
        // One range is left to request: up to the first length by which the file had grown enough.
        assert_eq!(ends.iter().collect::<Vec<_>>(), [PIECE + 1]);
    }
}
