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

use crate::error::{ANSWERED, SENT, TURNING};
use crate::postcopy::Switchover;
use crate::return_path::PONG_LOADED;
use crate::settle::{Settle, Settled, LOOK};
use crate::sockets::{drop_waiting, is_open, wait_readable};
use crate::threads::spawn;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Command: hold the descriptor sent with it. A `u64`, big-endian, follows: how far the main stream
/// is from the switch to postcopy ([`Switchover::encode`]).
const HOLD: u8 = 1;
/// Command: hold this descriptor, that of a preempt channel, as long as the one of [`HOLD`].
const HOLD_TOO: u8 = 2;
/// Bytes of a command with its number.
const MESSAGE: usize = 9;
/// A source in postcopy that shows nothing for so long is reported.
const LONG: Duration = Duration::from_secs(5);
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
    /// Starts `program`, which has to call [`keep`] with its standard input.
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

/// The keeper's half: obeys `control` until the relay has ended. If the relay was killed at the
/// wrong moment, it then goes on holding the socket, and `notice` gets a message for the user, and
/// another one if that changes.
///
/// # Errors
/// The control socket fails.
pub fn keep(control: &UnixStream, mut notice: impl FnMut(&str)) -> io::Result<()> {
    let mut held: Option<(OwnedFd, Option<Switchover>)> = None;
    let mut message = [0; MESSAGE];
    let mut got = 0;
    let (mut descriptor, mut preempt) = (None, None);
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut message[got..])];
        let received = match recvmsg(control, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            received => received?,
        };
        debug_assert!(!received.flags.contains(ReturnFlags::CTRUNC));
        for ancillary in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = ancillary {
                descriptor = fds.last().or(descriptor);
            }
        }
        if received.bytes == 0 {
            break;
        }
        got += received.bytes;
        if got < MESSAGE {
            continue;
        }
        got = 0;
        let [kind, number @ ..] = message;
        match (kind, descriptor.take()) {
            (HOLD, Some(fd)) => held = Some((fd, Switchover::decode(u64::from_be_bytes(number)))),
            (HOLD_TOO, fd) => preempt = fd,
            _ => held = None,
        }
    }
    // Ends behind the connection that `held` has.
    let _preempt = preempt.filter(|_| held.is_some()).map(Drained::new);
    let notice = &mut notice;
    match held {
        // The source is still writing its packaged state, without which the destination's VM cannot
        // start. The source has to see its socket close, and fails before it is in postcopy.
        Some((_, Some(switchover))) if !switchover.is_packaged() => Ok(()),
        Some((fd, Some(Switchover::Answered))) => {
            rustix::io::ioctl_fionbio(&fd, true)?;
            // The relay may have been killed before it wrote this PONG. QEMU ignores a second one.
            let _ = rustix::io::write(&fd, &PONG_LOADED);
            pause(&fd, true, notice)
        }
        Some((fd, Some(Switchover::Switched))) => pause(&fd, false, notice),
        Some((fd, switchover)) => hold_on(&fd, switchover, notice),
        None => Ok(()),
    }
}

/// A preempt channel, whose pages are dropped: QEMU writes them with a lock that the thread of its
/// main channel needs, and may fail, and run its VM, where the channel has ended.
struct Drained(Arc<OwnedFd>);

impl Drained {
    fn new(socket: OwnedFd) -> Self {
        let socket = Arc::new(socket);
        let drained = socket.clone();
        // Without a thread the channel is at least held.
        let _ = spawn("preempt", move || {
            while is_open(&drained) {
                wait_readable(&drained, None);
                drop_waiting(&drained);
            }
        });
        Self(socket)
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        // Ends the thread, too.
        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
    }
}

/// Closes the socket of a source in postcopy once the source pauses then. `answered`: it has the
/// PONG of its packaged state, and may not have seen it yet.
fn pause(socket: &OwnedFd, answered: bool, notice: &mut dyn FnMut(&str)) -> io::Result<()> {
    let mut settle = Settle::new(answered, None);
    let (since, mut told) = (Instant::now(), false);
    loop {
        match settle.look(socket) {
            Some(Settled::Pauses | Settled::Closed) => return Ok(()),
            Some(Settled::Sent) => return hold_on(socket, Some(Switchover::Sent), notice),
            None => std::thread::sleep(LOOK),
        }
        if since.elapsed() >= LONG && !std::mem::replace(&mut told, true) {
            match answered {
                true => notice(&in_doubt(Some(Switchover::Answered))),
                false => notice(SILENT),
            }
        }
    }
}

/// Holds `socket` open until QEMU closes its end, or is seen to be in postcopy.
fn hold_on(
    socket: &OwnedFd,
    mut switchover: Option<Switchover>,
    notice: &mut dyn FnMut(&str),
) -> io::Result<()> {
    let mut told = false;
    rustix::io::ioctl_fionbio(socket, true)?;
    loop {
        // poll always reports POLLHUP and POLLERR; readable bytes matter only in postcopy.
        let mut wanted = PollFlags::RDHUP;
        if matches!(switchover, Some(Switchover::Coming(_))) {
            wanted |= PollFlags::IN;
        }
        let mut fds = [PollFd::new(socket, wanted)];
        // A relay that ended by itself has shut the connection down. Then there is nothing to
        // report.
        let immediate = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = (!told).then_some(&immediate);
        let ready = match poll(&mut fds, timeout) {
            Err(rustix::io::Errno::INTR) => continue,
            ready => ready?,
        };
        let seen = fds[0].revents();
        if seen.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
            return Ok(());
        }
        if ready == 0 {
            if !std::mem::replace(&mut told, true) {
                notice(&in_doubt(switchover));
            }
            continue;
        }
        let Some(before) = switchover else { continue };
        match before.read_on(socket) {
            Ok(0) => return Ok(()),
            Ok(got) => match before.pass(got) {
                None => return pause(socket, false, notice),
                behind => switchover = behind,
            },
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(_) => return Ok(()),
        }
    }
}

/// The message about a source in this state whose relay was killed.
fn in_doubt(switchover: Option<Switchover>) -> String {
    let pid = std::process::id();
    match switchover {
        Some(Switchover::Answered) => format!(
            "the source relay was killed as the migration turned to postcopy, when the destination QEMU had \
             loaded the VM. The source VM is stopped and its migration left open, so that two copies cannot \
             run. {ANSWERED} (kill {pid}): both QEMUs pause the migration, and it can be taken up again"
        ),
        Some(Switchover::Unanswered) => format!(
            "the source relay was killed as the migration turned to postcopy, before the source QEMU \
             heard whether the destination QEMU has loaded the VM. The source VM is stopped and its \
             migration left open, so that two copies cannot run. {TURNING}. Then end this process \
             (kill {pid}), and the source VM goes on"
        ),
        Some(Switchover::Sent) => format!(
            "the source relay was killed at the end of a postcopy migration. The source VM is stopped \
             and its migration left open, so that two copies cannot run. Ask the source QEMU \
             (query-migrate). If ram.remaining is more than 0, end this process (kill {pid}): both \
             QEMUs pause the migration, and it can be taken up again. If it is 0: {SENT}, then end \
             this process, and the source VM goes on from the moment at which it was handed over"
        ),
        _ => IN_DOUBT.into(),
    }
}

/// The message about a source in postcopy that shows nothing.
const SILENT: &str =
    "the source relay was killed in postcopy, and the source QEMU has written nothing more: it may be writing the end of \
     its stream, and would run its VM beside the destination's if its connection closed. See that the source QEMU is not \
     stopped, and leave this process alone until it ends by itself";

const IN_DOUBT: &str =
    "the source relay was killed after the end of the stream may have reached the destination QEMU. The source VM is \
     stopped and its migration left open, so that two copies cannot run. Look at the destination: if its VM runs, quit \
     the source QEMU; if not, quit the destination QEMU first (it may still be loading), then cancel the migration on the \
     source (migrate_cancel), and the source VM goes on";

#[cfg(test)]
mod tests;
