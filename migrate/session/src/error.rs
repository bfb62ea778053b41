//! Everything that can go wrong between two relays.

use crate::frame_type::FrameType;
use std::io;

/// Why a session could not start or had to end. Unless said otherwise the peer (or the network) is
/// at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// A link could not be made.
    #[error("cannot connect to {peer}: is `platen receive` running there and the port open?")]
    Connect {
        /// The address tried.
        peer: String,
        /// The cause.
        source: io::Error,
    },
    /// A link was closed or failed.
    #[error("the link to {peer} was lost ({detail})")]
    LinkLost {
        /// The other end.
        peer: String,
        /// What the socket said.
        detail: String,
    },
    /// Nothing was heard from the peer for too long.
    #[error("{peer} has been silent for {seconds} s: its relay is stopped or the network is down")]
    Silent {
        /// The other end.
        peer: String,
        /// For how long.
        seconds: u64,
    },
    /// The link could not be secured, or the peer is not whom it should be.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// The first bytes are not ours.
    #[error(
        "{peer} does not speak the platen protocol{} (its first bytes are {first:02x?})",
        tls_hint(first)
    )]
    Magic {
        /// The other end.
        peer: String,
        /// What came.
        first: [u8; 8],
    },
    /// Another version of the protocol.
    #[error("{peer} speaks version {got} of the platen protocol, this end version {ours}: use the same platen on both hosts")]
    Version {
        /// The other end.
        peer: String,
        /// Its version.
        got: u16,
        /// Ours.
        ours: u16,
    },
    /// The hello was cut, too long, corrupt or not understood.
    #[error("the hello of {peer} cannot be used: {detail}")]
    Hello {
        /// The other end.
        peer: String,
        /// What is wrong with it.
        detail: String,
    },
    /// The peer read our hello and refuses.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The other end.
        peer: String,
        /// Its words.
        reason: String,
    },
    /// The header's CRC does not fit.
    #[error("frame header has checksum {got:#010x}, computed {computed:#010x}")]
    HeaderChecksum {
        /// As stated.
        got: u32,
        /// As computed.
        computed: u32,
    },
    /// No such frame type.
    #[error("frame type {got} is unknown")]
    FrameType {
        /// As stated.
        got: u8,
    },
    /// No such stream.
    #[error("frame of stream {got}, limit {limit}")]
    StreamId {
        /// As stated.
        got: u16,
        /// First invalid number.
        limit: usize,
    },
    /// A chunk larger than agreed.
    #[error("frame states {got} plain bytes, limit {limit}")]
    PlainLength {
        /// As stated.
        got: usize,
        /// As agreed.
        limit: usize,
    },
    /// A place in the stream that no stream has.
    #[error("frame states {plain} plain bytes at offset {got}: no stream is that long")]
    Offset {
        /// As stated.
        got: u64,
        /// Plain bytes of the frame, as stated.
        plain: u32,
    },
    /// Flags that frames of this type do not have.
    #[error("{kind:?} frame with flags {got:#x}")]
    Flags {
        /// The frame.
        kind: FrameType,
        /// As stated.
        got: u8,
    },
    /// A payload of an impossible length.
    #[error("{kind:?} frame states a payload of {got} bytes, limit {limit}")]
    PayloadLength {
        /// The frame.
        kind: FrameType,
        /// As stated.
        got: usize,
        /// As agreed.
        limit: usize,
    },
    /// A delta table that has no room, or on a frame that has no chunk.
    #[error("{kind:?} frame states a delta table of {got} bytes, limit {limit}")]
    TableLength {
        /// The frame.
        kind: FrameType,
        /// As stated.
        got: usize,
        /// What payload, buffer and protocol leave.
        limit: usize,
    },
    /// Too many channels.
    #[error("frame states {got} multifd channels, limit {limit}")]
    Channels {
        /// As stated.
        got: u32,
        /// The most.
        limit: usize,
    },
    /// An ACK whose length is no multiple of an entry.
    #[error("ACK of {got} bytes is not made of 26-byte entries")]
    AckLength {
        /// As stated.
        got: usize,
    },
    /// The peer acknowledges what was not sent.
    #[error("stream {stream}: frame {seq} is acknowledged, but only {sent} were sent")]
    AckBeyond {
        /// The stream.
        stream: u16,
        /// As acknowledged.
        seq: u64,
        /// As sent.
        sent: u64,
    },
    /// The peer acknowledges another number of bytes than was sent.
    #[error("stream {stream}: the other end says that {theirs} bytes were written up to frame {seq}, but {ours} were sent; the migration is stopped before a wrong byte can count")]
    AckOffset {
        /// The stream.
        stream: u16,
        /// The last frame acknowledged.
        seq: u64,
        /// Bytes sent up to it.
        ours: u64,
        /// Bytes that the peer says it has written.
        theirs: u64,
    },
    /// The two ends disagree about the bytes.
    #[error("stream {stream}: the running hash after frame {seq} is {theirs:#018x} on the other end and {ours:#018x} here; the migration is stopped before a wrong byte can count")]
    HashMismatch {
        /// The stream.
        stream: u16,
        /// The frame.
        seq: u64,
        /// Ours.
        ours: u64,
        /// The peer's.
        theirs: u64,
    },
    /// A frame twice, or too far ahead.
    #[error("stream {stream}: frame {seq} does not fit, {detail}")]
    Sequence {
        /// The stream.
        stream: u16,
        /// The frame.
        seq: u64,
        /// What is wrong.
        detail: String,
    },
    /// More in flight than the credits allow.
    #[error("stream {stream}: the peer sends beyond its credit")]
    Credit {
        /// The stream.
        stream: u16,
    },
    /// A unit that cannot be decoded.
    #[error("stream {stream}: frame {seq} cannot be decoded: {detail}")]
    Unit {
        /// The stream.
        stream: u16,
        /// The frame.
        seq: u64,
        /// The codec's or unpacker's words.
        detail: String,
    },
    /// Every link was lost, and none came back in time.
    #[error("{lost}, and did not come back within {seconds} s")]
    NotResumed {
        /// How the last link was lost.
        lost: String,
        /// How long was waited.
        seconds: u64,
    },
    /// The peer's session has ended, and it says how far it had come.
    #[error("{peer} has ended the migration: {reason}")]
    Over {
        /// The other end.
        peer: String,
        /// Its words.
        reason: String,
        /// It had written bytes that may hold the end-of-stream tag (W20).
        committed: bool,
        /// Its QEMU had confirmed that the VM is loaded.
        confirmed: bool,
    },
    /// The peer's FINISH where it cannot be.
    #[error("{peer} says that the migration is over, which it is not")]
    EarlyFinish {
        /// The other end.
        peer: String,
    },
    /// The peer ended the session.
    #[error("{peer} ended the migration: {reason}")]
    Aborted {
        /// The other end.
        peer: String,
        /// Its words.
        reason: String,
        /// It had written bytes that may hold the end-of-stream tag (W20).
        committed: bool,
    },
    /// This end ended the session.
    #[error("{reason}")]
    Local {
        /// Why.
        reason: String,
    },
    /// A thread, a socket option or memory could not be had.
    #[error("{what}")]
    Resource {
        /// What was wanted.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl SessionError {
    /// Whether only a link is concerned, so that others or a new one can go on.
    pub(crate) fn is_of_link(&self) -> bool {
        matches!(self, Self::LinkLost { .. } | Self::Silent { .. } | Self::Tls(_))
    }
}

/// A TLS ClientHello where plain bytes were expected.
fn tls_hint(first: &[u8; 8]) -> &'static str {
    match first {
        [22, 3, ..] => " without TLS, and this end was started with --insecure: leave it out here, or give it there",
        _ => "",
    }
}
