//! The keeper's half of [`keeper`](super::keeper): what it does with the connections that it holds.

use super::keeper::{HOLD, HOLD_TOO, MESSAGE};
use crate::error::{ANSWERED, SENT, TURNING};
use crate::postcopy::Switchover;
use crate::return_path::PONG_LOADED;
use crate::settle::{Settle, Settled, LOOK};
use crate::sockets::{drop_waiting, is_open, wait_readable};
use crate::threads::spawn;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A source in postcopy that shows nothing for so long is reported.
const LONG: Duration = Duration::from_secs(5);

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
            (HOLD_TOO, fd) => preempt = preempt.or(fd),
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
