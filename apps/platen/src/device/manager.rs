//! The service manager (systemd), as the environment describes it.

/// The service manager.
pub(super) struct Manager {
    /// Its socket (`NOTIFY_SOCKET`).
    pub(super) notify: Option<String>,
    /// Whether it expects a heartbeat each second (`WATCHDOG_USEC`).
    pub(super) watched: bool,
}
