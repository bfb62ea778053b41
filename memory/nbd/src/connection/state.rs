//! Requests that are in progress.

use crate::wire::Error;

/// A request done in slices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Large {
    pub(super) cookie: u64,
    pub(super) write: bool,
    /// Slices in flight.
    pub(super) slices: usize,
    /// Whether the last slice is in flight or done.
    pub(super) complete: bool,
    pub(super) error: Option<Error>,
}

/// A read that waits for slices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) left: usize,
    /// The read's place in `larges`, once a slice of it was submitted.
    pub(super) large: Option<usize>,
}

/// The use of a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) large: usize,
    /// The offset of the slice's first byte in the export.
    pub(super) offset: u64,
    /// The bytes in use, from `start`.
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) first: bool,
    pub(super) last: bool,
    /// The result, when the slice is complete.
    pub(super) over: Option<Result<(), Error>>,
}

/// A request whose bytes are being received.
#[derive(Clone, Copy, Debug)]
pub(super) enum Current {
    Write { large: usize, offset: u64, left: usize, slice: Option<(usize, usize)> },
    Skip { left: usize },
}

/// The parser's next requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// More bytes.
    Input,
    /// A free slice, or space for replies.
    Room,
    /// Nothing: the client has disconnected.
    End,
}
