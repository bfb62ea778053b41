//! The evidence of a source end on where the VM is, and the messages to the source QEMU about it.

use super::super::shared::{Shared, SourceStream, FAREWELL};
use super::LOOK;
use crate::error::RelayError;
use crate::postcopy::Switchover;
use crate::return_path::{PONG_LOADED, SHUT_LOADED};
use crate::sockets::is_open;
use session::SessionError;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;
use stream::Kind;

impl Shared {
    /// The result of a session that ends while the source QEMU is in postcopy. `never`: the peer
    /// has written nothing that starts the VM.
    pub(in crate::source) fn interrupted(&self, cause: &SessionError, never: bool) -> RelayError {
        let cause = cause.to_string();
        if never {
            RelayError::Stranded { cause }
        } else {
            RelayError::Paused { cause }
        }
    }

    /// Whether the peer has said that it has not written bytes that start the VM, and never will.
    /// A relay that recovers a paused postcopy has no such bytes to write: the VM is at the
    /// destination.
    pub(in crate::source) fn says_never(&self, error: &SessionError) -> bool {
        let never = match error {
            SessionError::Aborted { committed, .. } => !committed,
            SessionError::Over { answer, .. } => !answer.committed,
            _ => false,
        };
        never && !self.recovers()
    }

    pub(super) fn recovers(&self) -> bool {
        self.streams().iter().any(|stream| stream.kind == Kind::Recovery)
    }

    /// After the session has ended: reads on in the main stream, only to see whether the source
    /// switches to postcopy.
    pub(in crate::source) fn look_for_switch(&self) {
        if !matches!(self.switchover.get(), Some(Switchover::Coming(_))) || self.has_switched() {
            return;
        }
        for stream in self.streams().iter().filter(|stream| stream.kind == Kind::Main) {
            while let Some(before) = self.switchover.get() {
                match before.read_on(stream.socket()) {
                    Ok(0) | Err(_) => break,
                    Ok(got) => match before.pass(got) {
                        Some(behind) => self.switchover.set(Some(behind)),
                        None => {
                            self.switched.store(true, Ordering::Release);
                            return;
                        }
                    },
                }
            }
        }
    }

    /// Whether the destination has the VM in postcopy, and memory of it is still to come. Then a
    /// source whose socket closes at the right moment pauses.
    pub(in crate::source) fn is_in_postcopy(&self) -> bool {
        (self.has_switched() || self.is_only_answered()) && !self.has_sent_all()
    }

    /// The destination QEMU reported a failure. A source in postcopy does not run its VM again.
    pub(in crate::source) fn refusal(&self, code: u32) -> RelayError {
        if self.is_in_postcopy() {
            RelayError::PostcopyRefused { code }
        } else {
            RelayError::DestinationRefused { code }
        }
    }

    /// The error of a source relay that is in doubt now.
    pub(super) fn doubt(&self, cause: &Arc<SessionError>) -> RelayError {
        let cause = cause.clone();
        match self.switchover.get() {
            Some(Switchover::Unanswered | Switchover::Answered) => {
                RelayError::TurnInDoubt { cause }
            }
            Some(Switchover::Sent) => RelayError::EndInDoubt { cause },
            _ => RelayError::InDoubt { cause },
        }
    }

    /// The main stream, if the bytes written to its QEMU end with a message, and none are being
    /// written.
    fn main_between_messages(&self) -> Option<Arc<SourceStream>> {
        if self.return_paths.load(Ordering::Acquire) > 0
            || !self.between_messages.load(Ordering::Acquire)
        {
            return None;
        }
        self.streams().into_iter().find(|stream| stream.kind.is_main())
    }

    /// Gives the source QEMU the PONG of the packaged state, which the destination QEMU has loaded;
    /// the links were lost before its own PONG came. Returns false when the source QEMU cannot have
    /// the PONG, or does not wait for it.
    pub(super) fn hand_pong(&self) -> bool {
        let main = self.is_unanswered().then(|| self.main_between_messages()).flatten();
        main.is_some_and(|main| {
            self.answer(&main, true);
            { main.socket() }.write_all(&PONG_LOADED).is_ok()
        })
    }

    /// Gives the source QEMU SHUT(0), since the destination QEMU has confirmed; the links were lost
    /// before its own SHUT(0) came. Returns false when the source QEMU cannot have it.
    pub(super) fn hand_success(&self) -> bool {
        // In postcopy other messages matter too, until all memory was sent. A message that was
        // written in part cannot be completed, and a thread that is still writing must not be
        // interrupted.
        let in_postcopy = self.switchover.get().is_some() || self.has_switched();
        if in_postcopy && !self.has_sent_all() {
            return false;
        }
        let Some(main) = self.main_between_messages() else { return false };
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
