//! The connection to a QEMU that continues after its player has died.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use crate::wire;

/// A connection to a QEMU that has received `migrate-recover`, held beside the player that uses it.
///
/// A QEMU that loses this connection before it has read RESUME does not pause again: QEMU 7.2
/// crashes, and the VM is lost. The player first has to ask for the received bitmaps, and may die
/// meanwhile. This copy then keeps the connection open. When it is dropped it sends RESUME, so that
/// QEMU pauses at the end of the connection and another player can continue.
#[derive(Debug)]
pub struct Recovery {
    stream: Option<UnixStream>,
}

impl Recovery {
    /// Holds `stream`, on which nothing has been written.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream: Some(stream) }
    }

    /// The connection, for the player.
    pub fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    /// Records that the player has sent RESUME ([`Event::Resuming`](crate::Event::Resuming)). From
    /// now on the player sends pages, so nothing else may be written.
    pub fn is_resumed(mut self) {
        self.stream = None;
    }
}

impl Drop for Recovery {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take() else { return };
        let mut out = Vec::new();
        wire::command(&mut out, wire::RESUME, &[]);
        // The write fails if QEMU has ended. QEMU ignores a second RESUME, which follows if a
        // player died before it could report the first one.
        let _ = stream.write_all(&out);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_connection_ends_with_resume_unless_the_player_has_sent_it() {
        for (resumed, expected) in [(false, &[8, 0, 9, 0, 0][..]), (true, &[])] {
            let (here, mut there) = UnixStream::pair().unwrap();
            let recovery = Recovery::new(here);
            // The player has died.
            drop(recovery.connection().unwrap().try_clone_to_owned().unwrap());
            match resumed {
                true => recovery.is_resumed(),
                false => drop(recovery),
            }
            let mut bytes = Vec::new();
            there.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, expected);
        }
    }
}
