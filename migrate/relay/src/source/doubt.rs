//! What a source relay makes of an end that is not clear: whether QEMU is in postcopy for good,
//! what was said last, and the wait for whoever can say where the VM runs (W23, W28).

use super::{Event, Shared, SourceStream};
use crate::error::RelayError;
use crate::intake;
use rustix::net::{recv, RecvFlags};
use session::{Redial, SessionError, Verdict};
use std::sync::atomic::{fence, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::Kind;

/// How often QEMU's socket is looked at while the peer is lost and the destination may run.
pub(super) const LOOK: Duration = Duration::from_millis(200);
/// How often a peer that has not answered is asked again.
const ASK: Duration = Duration::from_secs(2);
/// How long to wait for the peer's own words once its QEMU has gone.
const REASON: Duration = Duration::from_secs(2);

impl Shared {
    /// Whether the source QEMU still has its main connection open.
    pub(super) fn main_is_open(&self) -> bool {
        let streams = self.lock_streams();
        let mut main =
            streams.iter().filter(|stream| stream.kind.get().is_some_and(|kind| kind.is_main()));
        main.any(|stream| intake::is_open(&stream.socket))
    }

    /// Whether the source QEMU is in postcopy for good.
    pub(super) fn has_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// Whether the destination may have all that starts its VM. While the source QEMU has not
    /// written the whole packaged state it has not, whatever was said of the part before: with its
    /// socket closed, QEMU fails in that write and its own VM goes on. Once the session has failed,
    /// what was not there before goes nowhere.
    pub(super) fn may_run_there(&self) -> bool {
        let complete = || self.before_switch.load(Ordering::Acquire) <= intake::PING;
        self.has_switched() || self.word_sent.load(Ordering::Acquire) && complete()
    }

    /// A session that ends when the source QEMU is in postcopy. `never`: the peer has written
    /// nothing that starts the VM.
    pub(super) fn interrupted(&self, cause: &SessionError, never: bool) -> RelayError {
        let cause = cause.to_string();
        // Who takes up a paused postcopy has nothing more to write of that kind: the VM is there.
        let recovers = self.lock_streams().iter().any(|s| s.kind.get() == Some(&Kind::Recovery));
        if never && !recovers {
            RelayError::Stranded { cause }
        } else {
            RelayError::Paused { cause }
        }
    }

    /// With the session gone: reads on in the main stream, for nothing but to see whether the
    /// source goes over to postcopy, which it does in what it writes behind its packaged state and
    /// a PING.
    pub(super) fn look_for_switch(&self) {
        let left = self.before_switch.load(Ordering::Acquire);
        if left == 0 || self.has_switched() {
            return;
        }
        let mut bytes = [0; 16384];
        for stream in self.lock_streams().iter().filter(|s| s.kind.get() == Some(&Kind::Main)) {
            while let Ok((_, got @ 1..)) = recv(&stream.socket, &mut bytes[..], RecvFlags::DONTWAIT)
            {
                let left = self.before_switch.load(Ordering::Acquire);
                match left.checked_sub(got as u64) {
                    Some(left @ 1..) => self.before_switch.store(left, Ordering::Release),
                    _ => {
                        self.switched.store(true, Ordering::Release);
                        return;
                    }
                }
            }
        }
    }

    /// The destination may have what starts its VM from now on: until the source has heard of it,
    /// or cannot start its own any more, its socket must stay open even if this process dies.
    pub(crate) fn guard(&self, stream: &SourceStream, before_switch: Option<u64>) {
        let Some(keeper) = self.keeper.get() else { return };
        // In postcopy each time, as what is still to come gets less.
        if before_switch.is_some() || !self.kept.swap(true, Ordering::AcqRel) {
            if let Err(error) = keeper.hold(&stream.socket, before_switch) {
                // It leaves what there is without one.
                let _ = self.events.send(Event::Notice(format!(
                    "the process that would keep QEMU's socket if this relay were killed has gone ({error}): if it is \
                     killed before the destination has answered, look there before the source VM goes on"
                )));
            }
        }
    }

    /// The source QEMU is in postcopy for good.
    pub(crate) fn has_gone_over(&self) {
        if !self.switched.swap(true, Ordering::AcqRel) {
            // As in `still_open`: either what shows the switch stays here, as the session has
            // failed, or whoever decides what that means sees the flag.
            fence(Ordering::SeqCst);
            if let Some(keeper) = self.keeper.get() {
                keeper.release();
            }
        }
    }
}

/// The peer's own words on why its QEMU has gone, if they come soon.
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

/// Whether the peer has said that it has written nothing that starts the VM, and never will.
pub(super) fn says_never(error: &SessionError) -> bool {
    matches!(
        error,
        SessionError::Aborted { committed: false, .. }
            | SessionError::Over { committed: false, .. }
    )
}

#[derive(Default)]
pub(super) struct LastWords {
    pub(super) shut: Option<u32>,
    pub(super) main_eof: bool,
}

/// The session has ended: lets what has already arrived on the return paths reach the source QEMU,
/// and says what it was.
pub(super) fn last_words(shared: &Shared, events: &Receiver<Event>) -> LastWords {
    let mut last = LastWords::default();
    for stream in shared.lock_streams().iter() {
        if let Some(results) = stream.results.get() {
            results.close();
        }
    }
    let deadline = Instant::now() + REASON;
    loop {
        let event = if shared.backs.load(Ordering::Acquire) > 0 {
            events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        } else {
            // Each has sent its events before it was counted off.
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
/// person ends them, or the peer can be asked and says that it never will.
pub(super) fn hold(
    shared: &Shared,
    redial: &Redial,
    events: &Receiver<Event>,
    cause: Arc<SessionError>,
    notice: &mut impl FnMut(&str),
) -> RelayError {
    let doubt = RelayError::InDoubt { cause: cause.clone() };
    notice(&doubt.to_string());
    // Nobody but `look_for_switch` is to read on in QEMU's main connection.
    shared.session.fail(SessionError::Local { reason: cause.to_string() });
    let mut asked = Some(Instant::now());
    loop {
        if shared.has_switched() {
            return shared.interrupted(&cause, false);
        }
        match events.recv_timeout(LOOK) {
            Ok(Event::Stop) | Err(RecvTimeoutError::Disconnected) => {
                return RelayError::LeftInDoubt
            }
            // The readers have ended with the session, so QEMU's socket is looked at here.
            _ if !shared.main_is_open() => return doubt,
            _ => shared.look_for_switch(),
        }
        if !shared.has_switched() && asked.is_some_and(|last| last.elapsed() >= ASK) {
            asked = match redial.ask() {
                Ok(Verdict { committed: false, .. }) => {
                    shared.look_for_switch();
                    if shared.has_switched() {
                        return shared.interrupted(&cause, true);
                    }
                    return RelayError::NeverCommitted;
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
