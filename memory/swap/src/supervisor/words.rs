//! The messages between supervisor and server, one a line.

/// Server: ready to serve.
pub const READY: &str = "ready";

/// Server that replaces another one: requests of the disk's client in the kernel reach it. See
/// [`Service::is_connected_later`](super::Service::is_connected_later).
pub const CONNECTED: &str = "connected";

/// Server that replaces another one: that client has taken no connection, and will take none.
pub const UNCONNECTED: &str = "unconnected";

/// Server: start a trainer. The socket by which the two will talk comes with the message.
pub const TRAIN: &str = "train";

/// Server: the trainer is no longer needed.
pub const ENOUGH: &str = "enough";

/// Server that is to replace another one: it has its memory and waits for [`GO`].
pub const STANDS_BY: &str = "stands by";

/// Supervisor, to a stand-by server: start serving. The result of
/// [`Service::go`](super::Service::go) follows on the same line.
pub const GO: &str = "go ";

/// Supervisor: end.
pub const END: &str = "end";
