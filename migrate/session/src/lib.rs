//! The host-to-host protocol: links, streams, credits, acknowledgements. See docs/wire.md.
