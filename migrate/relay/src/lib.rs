//! The two relays: QEMU sockets on one side, a session on the other.
