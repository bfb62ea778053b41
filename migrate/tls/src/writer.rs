//! The half of a secured connection that seals records, for the thread of a link that writes.

use crate::error::TlsError;
use crate::record::{
    broken, Common, Half, ALERT, DATA, HANDSHAKE, KEY_UPDATE, MAX_PLAIN, OVERHEAD,
};
use std::io::{self, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// Bytes sealed at a time: they fit into a cache, and a frame needs few system calls.
const OUT_BYTES: usize = 8 * (MAX_PLAIN + OVERHEAD);
/// AES-GCM's limit is 2^24 full records per key (RFC 8446, section 5.5); keys are renewed well
/// before.
const REKEY: u64 = 1 << 23;

/// The writing half of a secured connection. Use it with the connection's own socket.
pub struct Writer {
    half: Half,
    common: Arc<Common>,
    /// Plain bytes of the record being filled.
    stage: Vec<u8>,
    out: Box<[u8]>,
    /// Sealed records in `out` not yet written to the socket.
    unsent: Range<usize>,
    rekey_at: u64,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("unsent", &self.unsent).finish_non_exhaustive()
    }
}

impl Writer {
    /// Takes over the writing half. `limit` is the number of records after which keys are renewed.
    pub(crate) fn new(half: Half, common: Arc<Common>, limit: u64) -> Self {
        Self {
            half,
            common,
            stage: Vec::with_capacity(MAX_PLAIN),
            out: vec![0; OUT_BYTES].into_boxed_slice(),
            unsent: 0..0,
            rekey_at: REKEY.min(limit / 2).max(1),
        }
    }

    /// Sends all of `parts`, one after the other, and returns the number of bytes on the wire.
    /// After an error of the socket `go_on` decides whether to retry (a timeout); if not, the
    /// connection is unusable.
    ///
    /// # Errors
    /// The socket's error, if `go_on` returns false; or a [`TlsError`] wrapped in one.
    pub fn write_all(
        &mut self,
        socket: &TcpStream,
        parts: &[&[u8]],
        mut go_on: impl FnMut(&io::Error) -> bool,
    ) -> io::Result<u64> {
        let mut sent = 0;
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                if self.stage.is_empty() && rest.len() >= MAX_PLAIN {
                    let (record, behind) = rest.split_at(MAX_PLAIN);
                    sent += self.seal(socket, DATA, Some(record), &mut go_on)?;
                    rest = behind;
                    continue;
                }
                let fits = rest.len().min(MAX_PLAIN - self.stage.len());
                let (now, behind) = rest.split_at(fits);
                self.stage.extend_from_slice(now);
                rest = behind;
                if self.stage.len() == MAX_PLAIN {
                    sent += self.seal(socket, DATA, None, &mut go_on)?;
                }
            }
        }
        if !self.stage.is_empty() {
            sent += self.seal(socket, DATA, None, &mut go_on)?;
        }
        Ok(sent + self.flush(socket, &mut go_on)?)
    }

    #[cfg(test)]
    pub(crate) fn renew_after(&mut self, records: u64) {
        self.rekey_at = records;
    }

    #[cfg(test)]
    pub(crate) fn records_under_key(&self) -> u64 {
        self.half.number
    }

    /// Sends close_notify. The call makes one attempt, limited by the socket's timeout, and ignores
    /// its failure.
    pub fn close(&mut self, socket: &TcpStream) {
        const CLOSE_NOTIFY: [u8; 2] = [1, 0];
        let sealed = self.seal(socket, ALERT, Some(&CLOSE_NOTIFY), &mut |_| false);
        if sealed.is_ok() {
            // A peer that reads no more sees a truncated connection, which is then the truth.
            let _ = self.flush(socket, &mut |_| false);
        }
    }

    /// Seals `plain`, or the staged bytes; first sends the sealed records if there is no room.
    fn seal(
        &mut self,
        socket: &TcpStream,
        kind: u8,
        plain: Option<&[u8]>,
        go_on: &mut dyn FnMut(&io::Error) -> bool,
    ) -> io::Result<u64> {
        let mut sent = 0;
        if self.half.number >= self.rekey_at || self.common.answer.load(Ordering::Acquire) {
            sent += self.rekey(socket, go_on)?;
        }
        sent += self.make_room(socket, go_on)?;
        let plain = plain.unwrap_or(&self.stage);
        let sealed = self.half.seal(kind, plain, &mut self.out[self.unsent.end..]);
        self.unsent.end += sealed.map_err(TlsError::into_io)?;
        self.stage.clear();
        Ok(sent)
    }

    /// Announces new keys to the peer, and switches to them.
    fn rekey(
        &mut self,
        socket: &TcpStream,
        go_on: &mut dyn FnMut(&io::Error) -> bool,
    ) -> io::Result<u64> {
        // The last byte tells the peer that it need not renew its own keys.
        const NEW_KEYS: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];
        let sent = self.make_room(socket, go_on)?;
        self.common.answer.store(false, Ordering::Release);
        let sealed = self.half.seal(HANDSHAKE, &NEW_KEYS, &mut self.out[self.unsent.end..]);
        self.unsent.end += sealed.map_err(TlsError::into_io)?;
        let next = self.common.next(|keys| keys.next_tx());
        let next = next.map_err(|error| broken(&error.to_string()));
        self.half = next.and_then(Half::new).map_err(TlsError::into_io)?;
        Ok(sent)
    }

    fn make_room(
        &mut self,
        socket: &TcpStream,
        go_on: &mut dyn FnMut(&io::Error) -> bool,
    ) -> io::Result<u64> {
        if self.out.len() - self.unsent.end < MAX_PLAIN + OVERHEAD {
            return self.flush(socket, go_on);
        }
        Ok(0)
    }

    fn flush(
        &mut self,
        mut socket: &TcpStream,
        go_on: &mut dyn FnMut(&io::Error) -> bool,
    ) -> io::Result<u64> {
        let mut sent = 0;
        while !self.unsent.is_empty() {
            match socket.write(&self.out[self.unsent.clone()]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.unsent.start += n;
                    sent += n as u64;
                }
                Err(error) if go_on(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.unsent = 0..0;
        Ok(sent)
    }
}
