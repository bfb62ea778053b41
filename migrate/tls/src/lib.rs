//! Mutual TLS 1.3 between relays.
