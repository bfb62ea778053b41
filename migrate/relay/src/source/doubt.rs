//! The end of a source relay in doubt: whether QEMU is in postcopy for good, the last messages from
//! the return path, and the wait for the peer or a person to report where the VM runs (W23, W28).

use super::shared::{Event, Shared, FAREWELL};
use crate::error::RelayError;
use crate::return_path::SHUT_LOADED;
use crate::sockets::is_open;
use rustix::net::{recv, RecvFlags};
use session::{Redial, SessionError, Verdict};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::Kind;

/// How often QEMU's socket is checked while the peer is lost and the destination may run.
pub(super) const LOOK: Duration = Duration::from_millis(200);
/// How often a peer that has not answered is asked again.
const ASK: Duration = Duration::from_secs(2);
/// How long to wait for the peer's reason once its QEMU has ended.
const REASON: Duration = Duration::from_secs(2);

impl Shared {
    /// The result of a session that ends while the source QEMU is in postcopy. `never`: the peer
    /// has written nothing that starts the VM.
    pub(super) fn interrupted(&self, cause: &SessionError, never: bool) -> RelayError {
        let cause = cause.to_string();
        // A relay that recovers a paused postcopy has no such bytes to write: the VM is at the
        // destination.
        let recovers = self.streams().iter().any(|stream| stream.kind == Kind::Recovery);
        if never && !recovers {
            RelayError::Stranded { cause }
        } else {
            RelayError::Paused { cause }
        }
    }

    /// After the session has ended: reads on in the main stream, only to see whether the source
    /// switches to postcopy.
    pub(super) fn look_for_switch(&self) {
        if self.switchover.get().is_none() || self.has_switched() {
            return;
        }
        let mut bytes = [0; 16384];
        for stream in self.streams().iter().filter(|stream| stream.kind == Kind::Main) {
            while let Ok((_, got @ 1..)) =
                recv(stream.socket(), &mut bytes[..], RecvFlags::DONTWAIT)
            {
                let before = self.switchover.get();
                match before.and_then(|switchover| switchover.pass(got as u64)) {
                    Some(behind) => self.switchover.set(Some(behind)),
                    None => {
                        self.switched.store(true, Ordering::Release);
                        return;
                    }
                }
            }
        }
    }
}

/// The peer's reason for the end of its QEMU, if it arrives soon.
pub(super) fn peer_reason(events: &Receiver<Event>) -> Option<RelayError> {
    let deadline = Instant::now() + REASON;
    while let Ok(event) = events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        match event {
            Event::Closed(error) => return Some(RelayError::Ended(error)),
            Event::Shut(code) if code != 0 => return Some(RelayError::DestinationRefused { code }),
            _ => {}
        }
    }
    None
}

/// Whether the peer has answered that it has not written bytes that start the VM, and never will.
pub(super) fn says_never(error: &SessionError) -> bool {
    matches!(
        error,
        SessionError::Aborted { committed: false, .. }
            | SessionError::Over { committed: false, .. }
    )
}

#[derive(Default)]
pub(super) struct FinalEvents {
    pub(super) shut: Option<u32>,
    pub(super) main_eof: bool,
}

/// After the session has ended: lets the bytes that have arrived on the return paths reach the
/// source QEMU, and returns the events.
pub(super) fn final_events(shared: &Shared, events: &Receiver<Event>) -> FinalEvents {
    let mut last = FinalEvents::default();
    shared.close_return_paths();
    let deadline = Instant::now() + REASON;
    loop {
        let event = if shared.return_paths.load(Ordering::Acquire) > 0 {
            events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        } else {
            // Each thread sends its events before it is counted off.
            events.try_recv().map_err(|_| RecvTimeoutError::Timeout)
        };
        match event {
            Ok(Event::Shut(code)) => last.shut = Some(code),
            Ok(Event::SourceEof { is_main: true }) => last.main_eof = true,
            Ok(_) => {}
            Err(_) => return last,
        }
    }
}

/// W23, W28: the peer is lost and the destination may run. QEMU's sockets stay open until QEMU or a
/// person closes them, or the peer answers that it will never start the VM, or that it runs it.
///
/// # Errors
/// Every end but one: the peer runs the VM, and the source QEMU has been informed.
pub(super) fn hold(
    shared: &Shared,
    redial: &Redial,
    events: &Receiver<Event>,
    cause: Arc<SessionError>,
    notice: &mut impl FnMut(&str),
) -> Result<(), RelayError> {
    let doubt = RelayError::InDoubt { cause: cause.clone() };
    notice(&doubt.to_string());
    // Only `look_for_switch` may read on in QEMU's main connection.
    shared.session.fail(SessionError::Local { reason: cause.to_string() });
    let mut asked = Some(Instant::now());
    loop {
        if shared.has_switched() {
            return Err(shared.interrupted(&cause, false));
        }
        match events.recv_timeout(LOOK) {
            Ok(Event::Stop(_)) | Err(RecvTimeoutError::Disconnected) => {
                return Err(RelayError::LeftInDoubt)
            }
            // The readers have ended with the session, so QEMU's socket is checked here.
            _ if !shared.main_is_open() => return Err(doubt),
            _ => shared.look_for_switch(),
        }
        if !shared.has_switched() && asked.is_some_and(|last| last.elapsed() >= ASK) {
            asked = match redial.ask() {
                Ok(Verdict { committed: false, .. }) => {
                    shared.look_for_switch();
                    if shared.has_switched() {
                        return Err(shared.interrupted(&cause, true));
                    }
                    return Err(RelayError::NeverCommitted);
                }
                Ok(Verdict { confirmed: true, .. }) if is_loss(&cause) && shared.hand_success() => {
                    notice("the peer is back: its QEMU has confirmed and runs the VM");
                    return Ok(());
                }
                Ok(Verdict { confirmed, .. }) => {
                    notice(if confirmed {
                        "the peer is back: its QEMU has confirmed and runs the VM. Quit the source QEMU"
                    } else {
                        "the peer is back, but cannot say whether its QEMU runs the VM: look there"
                    });
                    None
                }
                Err(_) => Some(Instant::now()),
            };
        }
    }
}

/// Whether the session ended only because the links were lost. After any other end, such as hashes
/// that differ, a person has to look at the destination.
fn is_loss(cause: &SessionError) -> bool {
    matches!(
        cause,
        SessionError::NotResumed { .. }
            | SessionError::LinkLost { .. }
            | SessionError::Silent { .. }
            | SessionError::Over { .. }
    )
}

impl Shared {
    /// The destination QEMU has confirmed, and the links were lost before its SHUT(0) came: gives
    /// the source QEMU that SHUT(0). False when the source QEMU cannot have it.
    fn hand_success(&self) -> bool {
        // In postcopy other messages matter too. A message of which a part was written cannot be
        // completed, and a thread that still writes must not be interrupted.
        if self.switchover.get().is_some()
            || self.has_switched()
            || self.return_paths.load(Ordering::Acquire) > 0
            || !self.between_messages.load(Ordering::Acquire)
        {
            return false;
        }
        let streams = self.streams();
        let Some(main) = streams.iter().find(|stream| stream.kind == Kind::Main) else {
            return false;
        };
        self.handing_shut.store(true, Ordering::Release);
        let mut socket = main.socket();
        if socket.write_all(&SHUT_LOADED).is_err() {
            return false;
        }
        // QEMU closes when it has read it. If this end closes first, nothing is lost either.
        let deadline = Instant::now() + FAREWELL;
        while is_open(socket) && Instant::now() < deadline {
            std::thread::sleep(LOOK / 10);
        }
        true
    }
}
