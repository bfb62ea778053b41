//! The errors of a session between two relays.

use crate::frame_type::FrameType;
use crate::verdict::Verdict;
use std::error::Error;
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
        /// Seconds without a byte.
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
    /// The peer speaks another version of the protocol.
    #[error("{peer} speaks version {got} of the platen protocol, this end version {ours}: use the same platen on both hosts")]
    Version {
        /// The other end.
        peer: String,
        /// The peer's version.
        got: u16,
        /// This end's version.
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
    /// The peer has closed the connection without an answer, after the time that it gives a hello.
    #[error(
        "{peer} closed the connection: this end's hello did not come within {seconds} s (is this \
         host too busy?)"
    )]
    HelloLate {
        /// The other end.
        peer: String,
        /// The time that the peer gives a hello, seconds.
        seconds: u64,
    },
    /// The peer read our hello and refused.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The other end.
        peer: String,
        /// The reason, in the peer's words.
        reason: String,
    },
    /// The CRC in a frame header is wrong.
    #[error("frame header has checksum {got:#010x}, computed {computed:#010x}")]
    HeaderChecksum {
        /// The CRC in the header.
        got: u32,
        /// The CRC computed from the header's other bytes.
        computed: u32,
    },
    /// The frame type is unknown.
    #[error("frame type {got} is unknown")]
    FrameType {
        /// The type that the peer stated.
        got: u8,
    },
    /// The stream number is too large.
    #[error("frame of stream {got}, limit {limit}")]
    StreamId {
        /// The number that the peer stated.
        got: u16,
        /// First invalid number.
        limit: usize,
    },
    /// A chunk is larger than agreed.
    #[error("frame states {got} plain bytes, limit {limit}")]
    PlainLength {
        /// The plain length that the peer stated, bytes.
        got: usize,
        /// The largest chunk agreed, bytes.
        limit: usize,
    },
    /// An offset lies beyond the end of any stream.
    #[error("frame states {plain} plain bytes at offset {got}: no stream is that long")]
    Offset {
        /// The offset that the peer stated.
        got: u64,
        /// The frame's plain bytes, as the peer stated them.
        plain: u32,
    },
    /// A frame has flags that its type does not allow.
    #[error("{kind:?} frame with flags {got:#x}")]
    Flags {
        /// The type of the frame.
        kind: FrameType,
        /// The flags that the peer stated.
        got: u8,
    },
    /// A payload has an impossible length.
    #[error("{kind:?} frame states a payload of {got} bytes, limit {limit}")]
    PayloadLength {
        /// The type of the frame.
        kind: FrameType,
        /// The length that the peer stated, bytes.
        got: usize,
        /// The limit for this type of frame, bytes.
        limit: usize,
    },
    /// An offer of pages is invalid (W29b).
    #[error("the peer's offer of pages: {detail}")]
    Offer {
        /// The defect.
        detail: String,
    },
    /// A delta table does not fit, or belongs to a frame without a chunk.
    #[error("{kind:?} frame states a delta table of {got} bytes, limit {limit}")]
    TableLength {
        /// The type of the frame.
        kind: FrameType,
        /// The length that the peer stated, bytes.
        got: usize,
        /// The room that payload, buffer and protocol allow, bytes.
        limit: usize,
    },
    /// A frame states too many channels.
    #[error("frame states {got} multifd channels, limit {limit}")]
    Channels {
        /// The number that the peer stated.
        got: u32,
        /// The largest number allowed.
        limit: usize,
    },
    /// The length of an ACK is not a multiple of the length of an entry.
    #[error("ACK of {got} bytes is not made of 26-byte entries")]
    AckLength {
        /// The length that the peer stated, bytes.
        got: usize,
    },
    /// The peer acknowledges frames that were not sent.
    #[error("stream {stream}: frame {seq} is acknowledged, but only {sent} were sent")]
    AckBeyond {
        /// The stream.
        stream: u16,
        /// The frame below which the peer acknowledges all.
        seq: u64,
        /// The number of frames sent.
        sent: u64,
    },
    /// The peer acknowledges a number of bytes that was not sent.
    #[error("stream {stream}: the other end says that {theirs} bytes were written up to frame {seq}, but {ours} were sent; the migration is stopped before a wrong byte can count")]
    AckOffset {
        /// The stream.
        stream: u16,
        /// The last frame acknowledged.
        seq: u64,
        /// Bytes sent up to that frame.
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
        /// The running hash at this end.
        ours: u64,
        /// The running hash at the peer.
        theirs: u64,
    },
    /// A frame came twice, or too far ahead of the others.
    #[error("stream {stream}: frame {seq} does not fit, {detail}")]
    Sequence {
        /// The stream.
        stream: u16,
        /// The frame.
        seq: u64,
        /// The defect.
        detail: String,
    },
    /// The peer has more in flight than its credits allow.
    #[error("stream {stream}: the peer sends beyond its credit")]
    Credit {
        /// The stream.
        stream: u16,
    },
    /// A unit cannot be decoded.
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
    #[error("{lost}, and did not come back within {seconds} s{}", last_attempt(tried.as_deref()))]
    NotResumed {
        /// How the last link was lost.
        lost: String,
        /// Seconds that this end waited for a new link.
        seconds: u64,
        /// Why the last attempt at a new link failed, if this end made one.
        tried: Option<String>,
    },
    /// The peer's session has ended; the peer reports how far it got.
    #[error("{peer} has ended the migration: {reason}")]
    Over {
        /// The other end.
        peer: String,
        /// The reason, in the peer's words.
        reason: String,
        /// How far the peer's session got.
        answer: Verdict,
    },
    /// The peer sent FINISH before the migration was over.
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
        /// The peer had written bytes that may hold the end-of-stream tag (W20).
        committed: bool,
        /// The peer may ask how far this end got (W28).
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
    /// The message, and those of the causes.
    pub fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }

    /// Whether the error ends only a link, so that other links, or a new one, can continue.
    pub(crate) fn is_of_link(&self) -> bool {
        matches!(
            self,
            Self::LinkLost { .. } | Self::HelloLate { .. } | Self::Silent { .. } | Self::Tls(_)
        )
    }
}

/// The last attempt at a new link, for the end of a message.
fn last_attempt(error: Option<&str>) -> String {
    error.map_or(String::new(), |error| format!(" (the last attempt: {error})"))
}

/// A hint when a TLS ClientHello came instead of plain bytes.
fn tls_hint(first: &[u8; 8]) -> &'static str {
    match first {
        [22, 3, ..] => " without TLS, and this end was started with --insecure: leave it out here, or give it there",
        _ => "",
    }
}
