//! The half of a secured connection that opens records, for the thread of a link that reads.

use crate::error::{describe_alert, TlsError};
use crate::record::{
    broken, Common, Half, ALERT, DATA, HANDSHAKE, KEY_UPDATE, MAX_PLAIN, MAX_RECORD_BODY,
    RECORD_HEADER, TAG,
};
use aws_lc_rs::aead::Aad;
use rustls::AlertDescription;
use std::io::{self, Read};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// Bytes read at a time: more than a record, so that there is always room for the rest of one.
const IN_BYTES: usize = 128 << 10;
/// Consecutive records without data accepted: an honest peer sends a key update now and then.
const MAX_EMPTY: u32 = 32;
const NEW_SESSION_TICKET: u8 = 4;

/// The reading half of a secured connection. Use it with the connection's own socket.
pub struct Reader {
    half: Half,
    common: Arc<Common>,
    buffer: Box<[u8]>,
    /// Ciphertext in `buffer`: whole records and the beginning of one.
    records: Range<usize>,
    /// Opened bytes in `buffer` that have not been returned yet; they are before `records`.
    plain: Range<usize>,
    /// Records without data since the last one with data.
    empty: u32,
    closed: bool,
    wire_bytes: u64,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("records", &self.records).finish_non_exhaustive()
    }
}

/// The contents of an opened record.
enum Opened {
    Data(usize),
    Other,
    Close,
}

impl Reader {
    /// Takes over the reading half. `received` are bytes that arrived behind the handshake.
    pub(crate) fn new(half: Half, common: Arc<Common>, received: &[u8]) -> Result<Self, TlsError> {
        let mut buffer = vec![0; IN_BYTES].into_boxed_slice();
        let end = received.len();
        let head =
            buffer.get_mut(..end).ok_or_else(|| broken("too much came with the handshake"))?;
        head.copy_from_slice(received);
        Ok(Self {
            half,
            common,
            buffer,
            records: 0..end,
            plain: 0..0,
            empty: 0,
            closed: false,
            wire_bytes: end as u64,
        })
    }

    /// Reads plain bytes into `out`, at most one record's; 0 after the peer's close_notify. An
    /// error of the socket (a timeout) loses nothing: call again. `Interrupted` means that bytes
    /// arrived, but not yet a whole record, so that the caller can check its deadline.
    ///
    /// # Errors
    /// The socket's error; `UnexpectedEof` when it ends without close_notify; a wrapped
    /// [`TlsError`] for a record that does not authenticate, an alert, or anything else that is not
    /// data.
    pub fn read(&mut self, mut socket: &TcpStream, out: &mut [u8]) -> io::Result<usize> {
        while !out.is_empty() && !self.closed {
            if !self.plain.is_empty() {
                let n = self.plain.len().min(out.len());
                out[..n].copy_from_slice(&self.buffer[self.plain.start..self.plain.start + n]);
                self.plain.start += n;
                return Ok(n);
            }
            if let Some(body) = self.whole_record().map_err(TlsError::into_io)? {
                let opened = self.open(body, out).map_err(TlsError::into_io)?;
                match opened {
                    Opened::Data(0) | Opened::Other => {
                        self.empty += 1;
                        if self.empty > MAX_EMPTY {
                            let error = broken("the peer sends records without data");
                            return Err(error.into_io());
                        }
                    }
                    Opened::Data(n) if n != usize::MAX => {
                        self.empty = 0;
                        return Ok(n);
                    }
                    // The bytes are in `plain`.
                    Opened::Data(_) => self.empty = 0,
                    Opened::Close => self.closed = true,
                }
                continue;
            }
            if self.records.start > 0 {
                self.buffer.copy_within(self.records.clone(), 0);
                self.records = 0..self.records.len();
            }
            match socket.read(&mut self.buffer[self.records.end..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => {
                    self.records.end += n;
                    self.wire_bytes += n as u64;
                    if self.whole_record().map_err(TlsError::into_io)?.is_none() {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                }
            }
        }
        Ok(0)
    }

    /// Bytes read from the socket so far.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_bytes
    }

    /// The body of the first record, if it is complete.
    fn whole_record(&self) -> Result<Option<Range<usize>>, TlsError> {
        let Some(head) = self.buffer[self.records.clone()].first_chunk::<RECORD_HEADER>() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
        if head[0] != DATA || head[1] != 3 || !(1 + TAG..=MAX_RECORD_BODY).contains(&length) {
            return Err(broken("the bytes are no TLS record: they were damaged on the way"));
        }
        let from = self.records.start + RECORD_HEADER;
        Ok((self.records.end >= from + length).then_some(from..from + length))
    }

    /// Opens the record: into `out` if it has room for all of it, otherwise in place.
    fn open(&mut self, body: Range<usize>, out: &mut [u8]) -> Result<Opened, TlsError> {
        let forged =
            || broken("a record does not authenticate: it was damaged or forged on the way");
        let mut header = [0; RECORD_HEADER];
        header.copy_from_slice(&self.buffer[body.start - RECORD_HEADER..body.start]);
        let nonce = self.half.nonce();
        let aad = Aad::from(header);
        let length = body.len() - TAG;
        let into_out = out.len() >= length;
        let inner = if into_out {
            let (ciphertext, tag) = self.buffer[body.clone()].split_at(length);
            let inner = &mut out[..length];
            let opened = self.half.key.open_separate_gather(nonce, aad, ciphertext, tag, inner);
            opened.map_err(|_| forged())?;
            &*inner
        } else {
            let sealed = &mut self.buffer[body.clone()];
            &*self.half.key.open_in_place(nonce, aad, sealed).map_err(|_| forged())?
        };
        self.records.start = body.end;
        // The real type is the last byte that is not padding.
        let len = inner.iter().rposition(|byte| *byte != 0);
        let Some(len) = len else { return Err(broken("a record has no type")) };
        if len > MAX_PLAIN {
            return Err(broken("a record is too long"));
        }
        let (kind, content) = (inner[len], &inner[..len]);
        match kind {
            DATA if into_out => Ok(Opened::Data(len)),
            DATA => {
                self.plain = body.start..body.start + len;
                Ok(Opened::Data(if len == 0 { 0 } else { usize::MAX }))
            }
            ALERT => alert(content),
            HANDSHAKE => {
                let new_keys = handshake(content, &self.common)?;
                if new_keys {
                    let next = self.common.next(|keys| keys.next_rx());
                    self.half =
                        next.map_err(|error| broken(&error.to_string())).and_then(Half::new)?;
                }
                Ok(Opened::Other)
            }
            other => Err(broken(&format!("a record has type {other}"))),
        }
    }
}

fn alert(content: &[u8]) -> Result<Opened, TlsError> {
    const USER_CANCELED: u8 = 90;
    match content {
        [_, 0] => Ok(Opened::Close),
        [_, USER_CANCELED] => Ok(Opened::Other),
        [_, alert] => {
            let reason = describe_alert(AlertDescription::from(*alert));
            Err(TlsError::Broken { reason })
        }
        _ => Err(broken("an alert is damaged")),
    }
}

/// Processes the messages of a record behind the handshake; returns whether the next record has new
/// keys.
fn handshake(mut content: &[u8], common: &Common) -> Result<bool, TlsError> {
    while let [kind, a, b, c, rest @ ..] = content {
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        if rest.len() < length {
            break;
        }
        let (body, behind) = rest.split_at(length);
        content = behind;
        match (*kind, body) {
            // Tickets are never used.
            (NEW_SESSION_TICKET, _) => {}
            // The message must be the last of its record, or the rest would be under two keys.
            (KEY_UPDATE, [wanted @ (0 | 1)]) if behind.is_empty() => {
                if *wanted == 1 {
                    common.answer.store(true, Ordering::Release);
                }
                return Ok(true);
            }
            (kind, _) => {
                return Err(broken(&format!("a handshake message of type {kind} comes late")))
            }
        }
    }
    if content.is_empty() {
        return Ok(false);
    }
    Err(broken("a handshake message is cut"))
}
