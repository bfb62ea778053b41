//! The errors of a session between two relays.

use crate::frame_type::FrameType;
use crate::verdict::Verdict;
use std::io;

/// Why a session could not start or had to end. The fault is the peer's or the network's unless a
/// variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// A link could not be opened.
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
        /// The socket's error.
        detail: String,
    },
    /// Nothing was received from the peer for too long.
    #[error("{peer} has been silent for {seconds} s: its relay is stopped or the network is down")]
    Silent {
        /// The other end.
        peer: String,
        /// For how long.
        seconds: u64,
    },
    /// TLS failed, or the peer has the wrong identity.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// The first bytes are not the protocol's.
    #[error(
        "{peer} does not speak the platen protocol{} (its first bytes are {first:02x?})",
        tls_hint(first)
    )]
    Magic {
        /// The other end.
        peer: String,
        /// The bytes received.
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
    /// The hello was cut short, too long, corrupt or not understood.
    #[error("the hello of {peer} cannot be used: {detail}")]
    Hello {
        /// The other end.
        peer: String,
        /// The defect.
        detail: String,
    },
    /// The peer read our hello and refused.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The other end.
        peer: String,
        /// The reason, in the peer's words.
        reason: String,
    },
    /// The header's CRC is wrong.
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
    /// An offset beyond the end of any stream.
    #[error("frame states {plain} plain bytes at offset {got}: no stream is that long")]
    Offset {
        /// As stated.
        got: u64,
        /// Plain bytes of the frame, as stated.
        plain: u32,
    },
    /// Flags that this type of frame does not have.
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
    /// A delta table that does not fit, or on a frame without a chunk.
    #[error("{kind:?} frame states a delta table of {got} bytes, limit {limit}")]
    TableLength {
        /// The frame.
        kind: FrameType,
        /// As stated.
        got: usize,
        /// The room that payload, buffer and protocol allow.
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
    /// The peer acknowledges bytes that were not sent.
    #[error("stream {stream}: frame {seq} is acknowledged, but only {sent} were sent")]
    AckBeyond {
        /// The stream.
        stream: u16,
        /// As acknowledged.
        seq: u64,
        /// As sent.
        sent: u64,
    },
    /// The peer acknowledges a number of bytes that was not sent.
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
    /// A frame sent twice, or too far ahead.
    #[error("stream {stream}: frame {seq} does not fit, {detail}")]
    Sequence {
        /// The stream.
        stream: u16,
        /// The frame.
        seq: u64,
        /// The defect.
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
        /// The message of the codec or unpacker.
        detail: String,
    },
    /// Every link was lost, and none was replaced in time.
    #[error("{lost}, and did not come back within {seconds} s")]
    NotResumed {
        /// How the last link was lost.
        lost: String,
        /// The time waited.
        seconds: u64,
    },
    /// The peer's session has ended; the peer reports how far it got.
    #[error("{peer} has ended the migration: {reason}")]
    Over {
        /// The other end.
        peer: String,
        /// The reason, in the peer's words.
        reason: String,
        /// How far it got.
        answer: Verdict,
    },
    /// A FINISH of the peer before the migration is over.
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
        /// The reason, in the peer's words.
        reason: String,
        /// It had written bytes that may hold the end-of-stream tag (W20).
        committed: bool,
        /// It may ask how far this end got (W28).
        asks: bool,
    },
    /// This end ended the session.
    #[error("{reason}")]
    Local {
        /// The reason.
        reason: String,
    },
    /// The system refused a thread, a socket option or memory.
    #[error("{what}")]
    Resource {
        /// The action that failed.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl SessionError {
    /// Whether the error ends only a link, so that other links, or a new one, can continue.
    pub(crate) fn is_of_link(&self) -> bool {
        matches!(self, Self::LinkLost { .. } | Self::Silent { .. } | Self::Tls(_))
    }
}

/// A hint when a TLS ClientHello came instead of plain bytes.
fn tls_hint(first: &[u8; 8]) -> &'static str {
    match first {
        [22, 3, ..] => " without TLS, and this end was started with --insecure: leave it out here, or give it there",
        _ => "",
    }
}
