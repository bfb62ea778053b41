//! The messages between supervisor and server, one a line.

/// From a server: it is ready to serve.
pub const READY: &str = "ready";

/// From a server that replaces another one: requests of the disk's client in the kernel reach it.
/// See [`Service::is_connected_later`](super::Service::is_connected_later).
pub const CONNECTED: &str = "connected";

/// From a server that replaces another one: the client in the kernel has taken no connection, and
/// will take none.
pub const UNCONNECTED: &str = "unconnected";

/// From a server: start a trainer. The socket between server and trainer comes with the message.
pub const TRAIN: &str = "train";

/// From a server: the trainer is no longer needed.
pub const ENOUGH: &str = "enough";

/// From a server that is to replace another one: it has its memory and waits for [`GO`].
pub const STANDS_BY: &str = "stands by";

/// From such a server, before [`STANDS_BY`]: it gives the kernel's NBD client connections by the
/// disk's name, without which the kernel takes none for a disk that has a name. Earlier versions do
/// not send this line, and ignore it.
pub const NAMES_DISK: &str = "names its disk";

/// From the supervisor, to a stand-by server: start serving. The result of
/// [`Service::go`](super::Service::go) follows on the same line.
pub const GO: &str = "go ";

/// From the supervisor: end.
pub const END: &str = "end";
