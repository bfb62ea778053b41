//! What supervisor and server say to each other: a line each.

/// The server: it serves.
pub const READY: &str = "ready";

/// The server: a trainer is wanted. The socket by which the two will talk comes along.
pub const TRAIN: &str = "train";

/// The server: the trainer is not needed any more.
pub const ENOUGH: &str = "enough";

/// A server that is to take the place of another one: it has its memory, and waits for [`GO`].
pub const STANDS_BY: &str = "stands by";

/// The supervisor, to a server that stands by: it is needed now. What
/// [`Service::go`](super::Service::go) says follows on the same line.
pub const GO: &str = "go ";

/// The supervisor: the server is to end.
pub const END: &str = "end";
