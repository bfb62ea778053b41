//! The errors of a relay, apart from the session's.

use session::SessionError;
use std::io;
use std::sync::Arc;

/// Advice about a source QEMU that waits to hear whether the destination QEMU has loaded the
/// packaged state.
pub(crate) const TURNING: &str =
    "Its memory is still in the source QEMU: do not quit that one. Look at the destination: if its \
     QEMU is there, quit it (postcopy-active or postcopy-paused in its query-migrate means that the \
     VM has run there for a moment, which is then lost)";
/// Advice about a source QEMU that has its answer, and may not have read it.
pub(crate) const ANSWERED: &str =
    "Ask the source QEMU (query-migrate). While it says postcopy-device, it has not read that the \
     VM is loaded, and would run its VM beside the destination's: leave this process alone. Once it says \
     postcopy-active, end this process";
/// Advice about a source QEMU that has sent all in postcopy.
pub(crate) const SENT: &str =
    "The source QEMU has sent all its memory, and has not heard that the destination QEMU has it. Look \
     at the destination: if its query-migrate says completed, quit the source QEMU. If not, it lacks \
     memory that it cannot get any more: quit the destination QEMU";

/// Why a relay could not start or a migration failed. The messages name the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The path of a file that is not a socket.
    #[error("{address} is not a socket: give the path that QEMU listens on, or one that does not exist yet")]
    NotASocket {
        /// The address as it was given.
        address: String,
    },
    /// A path to listen on at which another file exists.
    #[error(
        "{address} is there already, and is not a socket: give a path that does not exist yet"
    )]
    InTheWay {
        /// The address as it was given.
        address: String,
    },
    /// A listening socket could not be created.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address as it was given.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The relay's socket path now leads to another process.
    #[error("{address} does not lead to this relay any more: another process has removed it or listens there. Nothing was migrated; start the relay again, with a path that no other process uses")]
    Displaced {
        /// The address as it was given.
        address: String,
    },
    /// The destination QEMU refuses connections.
    #[error("cannot connect to the destination QEMU at {address}: is it running with -incoming {address} (or -incoming defer and --qmp here)?")]
    Deliver {
        /// The address as it was given.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// The session failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The session failed; shared by several threads.
    #[error("{0}")]
    Ended(Arc<SessionError>),
    /// The destination QEMU left bytes unread, and there is no return path to give the reason.
    #[error("the destination QEMU closed its migration socket with bytes of the stream unread: it refused the stream or ended (see its log)")]
    Unread,
    /// The source QEMU ended the migration.
    #[error("the source QEMU ended the migration before the destination had confirmed it: it was cancelled, failed or ended (see its query-migrate). The destination does not run the VM")]
    SourceEnded,
    /// The source QEMU ended the migration when the destination might already have had the VM.
    #[error("the source QEMU closed its migration socket when the end of its stream had gone out, before it heard of success: the destination QEMU may run the VM. Look at both: if the VM runs twice, quit one QEMU at once")]
    SourceGone,
    /// The stream of a source without a return path ended too early.
    #[error("the source QEMU's stream broke off before its end: it was cut, or the source QEMU failed (see its query-migrate). Without a return path the destination QEMU may have been given what starts the VM: look there")]
    Truncated,
    /// The destination QEMU ended the migration.
    #[error("the destination QEMU closed its migration socket before it confirmed: it refused the stream or ended (see its log). query-status of each QEMU tells whether it runs the VM")]
    DestinationEnded,
    /// The destination QEMU reported a failure.
    #[error("the destination QEMU reports that loading failed (SHUT {code}, see its log). The destination does not run the VM; query-status of the source QEMU tells whether that does")]
    DestinationRefused {
        /// QEMU's value.
        code: u32,
    },
    /// The destination QEMU reported a failure when the source was in postcopy.
    #[error("the destination QEMU reports that loading failed (SHUT {code}, see its log) when the source QEMU was in postcopy, in which it does not run its VM again. query-status of both QEMUs tells what is left")]
    PostcopyRefused {
        /// QEMU's value.
        code: u32,
    },
    /// The peer was lost when the destination may already have been running.
    #[error("the peer was lost after the end of the stream may have reached the destination QEMU ({cause}). The source VM is stopped and its migration left open, so that two copies cannot run. Look at the destination: if its VM runs, quit the source QEMU; if not, quit the destination QEMU first (it may still be loading), then cancel the migration on the source (migrate_cancel) and end this relay, and the source VM goes on")]
    InDoubt {
        /// Why the peer is lost.
        cause: Arc<SessionError>,
    },
    /// The peer was lost before the source QEMU heard whether the packaged state was loaded.
    #[error("the peer was lost as the migration turned to postcopy ({cause}), before the source QEMU heard whether the destination QEMU has loaded the VM. The source VM is stopped and its migration left open, so that two copies cannot run. {TURNING}. Then end this relay, and the source VM goes on. If the peer comes back and can tell, this relay acts on its answer by itself")]
    TurnInDoubt {
        /// Why the peer is lost.
        cause: Arc<SessionError>,
    },
    /// The peer was lost when the source QEMU had sent all in postcopy.
    #[error("the peer was lost at the end of a postcopy migration ({cause}). The source VM is stopped and its migration left open, so that two copies cannot run. {SENT}, then end this relay, and the source VM goes on from the moment at which it was handed over")]
    EndInDoubt {
        /// Why the peer is lost.
        cause: Arc<SessionError>,
    },
    /// The user ended the relay while it was in doubt.
    #[error("this relay was told to end while the destination QEMU may have been starting the VM; the source QEMU goes on with it. Look at the destination at once: if its VM runs, there are two copies, and one QEMU has to be quit")]
    LeftInDoubt,
    /// The destination has the VM, and the source may not know it.
    #[error("the destination QEMU has confirmed and has the VM: leave it running. The source has not been informed ({cause}): if its QEMU is still there, quit that one")]
    Unheard {
        /// The reason why the source could not be informed.
        cause: Arc<SessionError>,
    },
    /// The peer was lost in doubt, answered later, and has not started the VM.
    #[error("the peer was lost near the end, and reports now that the end of the stream never reached the destination QEMU. The destination does not run the VM; query-status of the source QEMU tells whether that does")]
    NeverCommitted,
    /// A migration in postcopy was interrupted.
    #[error("the migration was interrupted in postcopy ({cause}): both QEMUs pause it. Where the destination QEMU says postcopy-paused, the VM is there, with nothing lost. To take it up again start both relays anew, then migrate-recover at the destination QEMU and migrate with resume=true at the source QEMU")]
    Paused {
        /// The cause of the interruption.
        cause: String,
    },
    /// A migration was interrupted while switching to postcopy: too late for the source QEMU, too
    /// early for the destination QEMU.
    #[error("the migration was interrupted as it turned to postcopy ({cause}): the source QEMU has gone over to postcopy and keeps its VM stopped, but the state that starts the VM never reached the destination QEMU. It runs nowhere, and no recovery can take it up")]
    Stranded {
        /// The cause of the interruption.
        cause: String,
    },
    /// A migration that this version does not support.
    #[error("{what}")]
    Unsupported {
        /// The unsupported thing, and how to avoid it.
        what: String,
    },
    /// A codec thread is in a call of the accelerator's library that does not return, and with it
    /// chunks of the migration.
    #[error("{hang}: this relay cannot go on. Look at the QAT device and its driver (`platen qat status`, the kernel's log), and {remedy} with --accelerator none")]
    Accelerator {
        /// The call.
        hang: qat::Hang,
        /// The advice, without the option.
        remedy: &'static str,
    },
    /// The system refused threads, sockets or memory.
    #[error("{what}")]
    Resource {
        /// The action that failed.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl RelayError {
    /// Whether the destination may run the VM after this end, or have it in postcopy.
    pub fn may_run_there(&self) -> bool {
        match self {
            Self::SourceGone
            | Self::Truncated
            | Self::InDoubt { .. }
            | Self::TurnInDoubt { .. }
            | Self::EndInDoubt { .. }
            | Self::LeftInDoubt
            | Self::Unheard { .. }
            | Self::Paused { .. } => true,
            Self::NotASocket { .. }
            | Self::InTheWay { .. }
            | Self::Listen { .. }
            | Self::Displaced { .. }
            | Self::Deliver { .. }
            | Self::Session(_)
            | Self::Ended(_)
            | Self::Unread
            | Self::SourceEnded
            | Self::DestinationEnded
            | Self::DestinationRefused { .. }
            | Self::PostcopyRefused { .. }
            | Self::NeverCommitted
            | Self::Stranded { .. }
            | Self::Unsupported { .. }
            | Self::Accelerator { .. }
            | Self::Resource { .. } => false,
        }
    }

    /// Whether the destination QEMU did not listen or accept, which may change.
    pub(crate) fn is_absence(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound, TimedOut, WouldBlock};
        matches!(self, Self::Deliver { source, .. }
            if matches!(source.kind(), NotFound | ConnectionRefused | WouldBlock | TimedOut))
    }
}

/// An error and its causes in one line.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
