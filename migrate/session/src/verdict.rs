//! The answer to the question of W28.

/// A peer's report on its session, after ours has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Whether bytes of W20 may have been written to QEMU. If not, none ever will be.
    pub committed: bool,
    /// Whether QEMU has confirmed that it runs the VM.
    pub confirmed: bool,
    /// Whether QEMU has loaded the packaged state of postcopy, so that it runs the VM (W20c).
    pub loaded: bool,
    /// Whether the peer is still waiting for its QEMU, and will have a better answer later.
    pub pending: bool,
}
