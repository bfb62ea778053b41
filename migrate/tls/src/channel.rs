//! A secured connection: one half for each thread of a link, and the identity of the other end.

use crate::error::TlsError;
use crate::peer::Peer;
use crate::reader::Reader;
use crate::record::{Common, Half, KeySource};
use crate::writer::Writer;
use rustls::ExtractedSecrets;
use std::sync::Arc;

/// A secured connection: both halves, and the identity of the other end.
pub struct Channel {
    /// For the thread that reads.
    pub reader: Reader,
    /// For the thread that writes.
    pub writer: Writer,
    /// The certificate at the other end.
    pub peer: Peer,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Channel {
    /// Takes over a connection after its handshake. `limit` is the number of records after which
    /// keys are renewed; `received` are bytes that arrived behind the handshake.
    pub(crate) fn new(
        secrets: ExtractedSecrets,
        keys: Box<dyn KeySource>,
        limit: u64,
        received: &[u8],
        peer: Peer,
    ) -> Result<Self, TlsError> {
        let common = Arc::new(Common::new(keys));
        Ok(Self {
            reader: Reader::new(Half::new(secrets.rx)?, common.clone(), received)?,
            writer: Writer::new(Half::new(secrets.tx)?, common, limit),
            peer,
        })
    }
}
