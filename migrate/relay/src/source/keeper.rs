//! The keeper: a process that holds the source QEMU's main connection open if the relay is killed
//! at the wrong moment.
//!
//! The wrong moment lasts from the time when the destination QEMU may have the bytes that start its
//! VM until the source QEMU is informed. A source whose socket closes in that time starts its own
//! VM again, and there are two copies. A relay that is killed (SIGKILL, out of memory) closes that
//! socket. So a second process with no other work holds a copy of the socket meanwhile:
//!
//! ```text
//!  relay ── control socket: HOLD + descriptor ──► keeper
//!    └────────────── main connection ─────── source QEMU ─────┘
//! ```
//!
//! A relay that ends by itself shuts the connection down; the keeper sees that and ends. A relay
//! that was killed does not: the keeper reports it and waits until QEMU closes the connection, or a
//! person ends the keeper.
//!
//! **In postcopy** the source has to see its socket close to pause, unless it has sent all its
//! memory. The end of the stream may wait in the socket, so the keeper looks before it closes
//! ([`Settle`]). Bytes beyond the PING behind the packaged state show that a source is in postcopy.
//! A source of QEMU 10.2 and later shows nothing: the keeper holds on until the relay has given it
//! the PONG of the packaged state, repeats that PONG, and goes on when the source must have seen
//! it. The keeper has no parser: a guest on huge pages that holds bytes like those of a stream's
//! sections could make it go on too early, within the first second behind the PONG.
//!
//! **A preempt channel** is held as well. Its end would make a source that is turning to postcopy
//! fail, and a source that waits for room in it writes nothing to the main channel.
//!
//! **What fails.** Without a keeper (killed as well) the source sees its socket close, as with QEMU
//! alone.
//!
//! [`Settle`]: crate::settle::Settle

use crate::postcopy::Switchover;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Command: hold the descriptor sent with it. A `u64`, big-endian, follows: how far the main stream
/// is from the switch to postcopy ([`Switchover::encode`]).
pub(super) const HOLD: u8 = 1;
/// Command: hold this descriptor, that of a preempt channel, as long as the one of [`HOLD`].
pub(super) const HOLD_TOO: u8 = 2;
/// Bytes of a command with its number.
pub(super) const MESSAGE: usize = 9;
/// How long the keeper may take to end once the relay has closed the control socket.
const KEEPER_ENDS: Duration = Duration::from_secs(1);

/// The relay's half: a running keeper process.
#[derive(Debug)]
pub struct Keeper {
    control: Option<UnixStream>,
    /// `None` where a thread plays the keeper (tests).
    child: Option<Child>,
}

impl Keeper {
    /// Starts `program`, which has to call [`keep`](super::keep) with its standard input.
    ///
    /// # Errors
    /// No socket, or the program does not start.
    pub fn spawn(program: &mut Command) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = program
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // The terminal's signals to the relay (Ctrl-C) must not reach the keeper.
            .process_group(0)
            .spawn()?;
        Ok(Self { control: Some(ours), child: Some(child) })
    }

    /// Sends a copy of `socket`. Once this returns, the keeper holds it, even if this process dies.
    /// `switchover`: how far the main stream is from postcopy, if it switches to postcopy.
    ///
    /// # Errors
    /// The keeper has ended.
    pub(super) fn hold(
        &self,
        socket: &impl AsFd,
        switchover: Option<Switchover>,
    ) -> io::Result<()> {
        self.pass_on(HOLD, Switchover::encode(switchover), socket)
    }

    /// Sends a copy of the `socket` of a preempt channel, which is held as long as the other.
    ///
    /// # Errors
    /// The keeper has ended.
    pub(super) fn hold_too(&self, socket: &impl AsFd) -> io::Result<()> {
        self.pass_on(HOLD_TOO, 0, socket)
    }

    fn pass_on(&self, kind: u8, number: u64, socket: &impl AsFd) -> io::Result<()> {
        let mut message = [0; MESSAGE];
        message[0] = kind;
        message[1..].copy_from_slice(&number.to_be_bytes());
        let fds = [socket.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        self.send(&message, &mut control)
    }

    fn send(
        &self,
        message: &[u8],
        control: &mut SendAncillaryBuffer<'_, '_, '_>,
    ) -> io::Result<()> {
        let Some(socket) = &self.control else { return Ok(()) };
        sendmsg(socket, &[IoSlice::new(message)], control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.control = None;
        let deadline = Instant::now() + KEEPER_ENDS;
        let Some(child) = &mut self.child else { return };
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod tests;
