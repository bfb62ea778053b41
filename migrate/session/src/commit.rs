//! The commit gate: whether bytes that may start the destination's VM were written to QEMU (W20).

use std::sync::atomic::{AtomicU8, Ordering};

/// No byte that may start the VM has been written yet.
const OPEN: u8 = 0;
/// Such bytes may have been written; an ABORT states that.
const PASSED: u8 = 1;
/// No such byte was written and none will be: the peer may have been informed, or QEMU has ended.
const CLOSED: u8 = 2;

/// The gate is either passed or closed, never both: one exchange decides.
#[derive(Debug)]
pub(crate) struct CommitGate(AtomicU8);

impl CommitGate {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(OPEN))
    }

    fn exchange(&self, to: u8) -> Result<u8, u8> {
        self.0.compare_exchange(OPEN, to, Ordering::AcqRel, Ordering::Acquire)
    }

    /// Passes the gate; false when it is closed.
    pub(crate) fn pass(&self) -> bool {
        matches!(self.exchange(PASSED), Ok(_) | Err(PASSED))
    }

    /// Closes the gate. Returns true if it was passed before; then it stays passed.
    pub(crate) fn close(&self) -> bool {
        self.exchange(CLOSED) == Err(PASSED)
    }

    /// Whether the gate was passed.
    pub(crate) fn is_passed(&self) -> bool {
        self.0.load(Ordering::Acquire) == PASSED
    }

    /// Takes back the pass, and closes the gate.
    pub(crate) fn revoke(&self) {
        self.0.store(CLOSED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::CommitGate;

    #[test]
    fn a_gate_is_either_passed_or_closed() {
        let gate = CommitGate::new();
        assert!(!gate.is_passed());
        assert!(gate.pass() && gate.pass() && gate.is_passed());
        assert!(gate.close(), "it was passed before");
        assert!(gate.pass(), "and stays passed");
        gate.revoke();
        assert!(!gate.is_passed() && !gate.pass() && !gate.close());
        let gate = CommitGate::new();
        assert!(!gate.close() && !gate.pass() && !gate.is_passed());
    }
}
