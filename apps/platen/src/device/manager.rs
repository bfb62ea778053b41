//! The service manager.

/// The service manager, by the environment.
pub(super) struct Manager {
    /// Its socket.
    pub(super) notify: Option<String>,
    /// Whether it expects a message each second.
    pub(super) watched: bool,
}
