//! TLS 1.3 records (RFC 8446, section 5), separately for each direction: one half for each thread
//! of a link.
//!
//! A record is a header of 5 bytes (23, 3, 3, length) and an AEAD ciphertext of plain bytes, their
//! real type and a tag of 16 bytes. The header is the additional data; the nonce is the direction's
//! IV combined with the record's number. Keys, IVs and their successors come from rustls.

use crate::error::{describe_alert, TlsError};
use crate::peer::Peer;
use aws_lc_rs::aead::{
    Aad, Algorithm, LessSafeKey, Nonce, UnboundKey, AES_128_GCM, AES_256_GCM, CHACHA20_POLY1305,
};
use rustls::{AlertDescription, ConnectionTrafficSecrets, Error, ExtractedSecrets};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) const RECORD_HEADER: usize = 5;
/// The most plain bytes of a record.
const MAX_PLAIN: usize = 1 << 14;
/// The most bytes behind a header: plain bytes, type and padding, tag, and the standard's reserve.
pub(crate) const MAX_RECORD_BODY: usize = MAX_PLAIN + 256;
const TAG: usize = 16;
/// Bytes of a record on the wire besides its plain bytes.
const OVERHEAD: usize = RECORD_HEADER + 1 + TAG;
/// Bytes sealed at a time: they fit into a cache, and a frame needs few system calls.
const OUT_BYTES: usize = 8 * (MAX_PLAIN + OVERHEAD);
/// Bytes read at a time: more than a record, so that there is always room for the rest of one.
const IN_BYTES: usize = 128 << 10;
/// AES-GCM's limit is 2^24 full records per key (RFC 8446, section 5.5); keys are renewed well
/// before.
const REKEY: u64 = 1 << 23;
/// Consecutive records without data accepted: an honest peer sends a key update now and then.
const MAX_EMPTY: u32 = 32;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// The source of new keys.
pub(crate) trait KeySource: Send {
    fn next_tx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
    fn next_rx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
}

/// The state that the two directions share. The lock is held for a key derivation, never during a
/// system call.
struct Common {
    keys: Mutex<Box<dyn KeySource>>,
    /// The peer has new keys and requests new ones of ours.
    answer: AtomicBool,
}

impl Common {
    fn next<T>(&self, of: impl FnOnce(&mut dyn KeySource) -> T) -> T {
        of(&mut **self.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

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
    /// `limit`: records after which keys are renewed; `received`: bytes that arrived behind the
    /// handshake.
    pub(crate) fn new(
        secrets: ExtractedSecrets,
        keys: Box<dyn KeySource>,
        limit: u64,
        received: Vec<u8>,
        peer: Peer,
    ) -> Result<Self, TlsError> {
        let common = Arc::new(Common { keys: Mutex::new(keys), answer: AtomicBool::new(false) });
        let mut buffer = vec![0; IN_BYTES].into_boxed_slice();
        let end = received.len();
        let head =
            buffer.get_mut(..end).ok_or_else(|| broken("too much came with the handshake"))?;
        head.copy_from_slice(&received);
        Ok(Self {
            reader: Reader {
                half: Half::new(secrets.rx)?,
                common: common.clone(),
                buffer,
                records: 0..end,
                plain: 0..0,
                empty: 0,
                closed: false,
                wire_bytes: end as u64,
            },
            writer: Writer {
                half: Half::new(secrets.tx)?,
                common,
                stage: Vec::with_capacity(MAX_PLAIN),
                out: vec![0; OUT_BYTES].into_boxed_slice(),
                unsent: 0..0,
                rekey_at: REKEY.min(limit / 2).max(1),
            },
            peer,
        })
    }
}

fn broken(reason: &str) -> TlsError {
    TlsError::Broken { reason: reason.into() }
}

/// The keys of one direction.
struct Half {
    key: LessSafeKey,
    iv: [u8; 12],
    /// Records so far under this key. A number is never used twice: `Writer` renews the key long
    /// before the number could wrap.
    number: u64,
}

impl Half {
    fn new((number, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, TlsError> {
        let (algorithm, key, iv): (&'static Algorithm, _, _) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(broken("the agreed cipher is unknown here")),
        };
        let unusable = || broken("the agreed keys cannot be used");
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unusable())?;
        let iv = iv.as_ref().try_into().map_err(|_| unusable())?;
        Ok(Self { key: LessSafeKey::new(key), iv, number })
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= number;
        }
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Seals one record into the front of `out`; returns its length on the wire.
    fn seal(&mut self, kind: u8, plain: &[u8], out: &mut [u8]) -> Result<usize, TlsError> {
        let body = plain.len() + 1 + TAG;
        let length = u16::try_from(body).map_err(|_| broken("a record is too long"))?.to_be_bytes();
        let header = [DATA, 3, 3, length[0], length[1]];
        let (head, rest) = out.split_at_mut(RECORD_HEADER);
        head.copy_from_slice(&header);
        let (ciphertext, rest) = rest.split_at_mut(plain.len());
        let nonce = self.nonce();
        self.key
            .seal_out_of_place_scatter(
                nonce,
                Aad::from(header),
                plain,
                ciphertext,
                &[kind],
                &mut rest[..1 + TAG],
            )
            .map_err(|_| broken("a record cannot be sealed"))?;
        Ok(RECORD_HEADER + body)
    }
}

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
    /// Sends all of `parts`, one after the other, and returns the number of bytes on the wire.
    /// After an error of the socket `go_on` decides whether to retry (a timeout); if not, the
    /// connection is unusable.
    ///
    /// # Errors
    /// The socket's, if `go_on` returns false; or a [`TlsError`] wrapped in one.
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

    /// Sends close_notify. Best effort: one try, limited by the socket's timeout.
    pub fn close(&mut self, socket: &TcpStream) {
        const CLOSE_NOTIFY: [u8; 2] = [1, 0];
        let sealed = self.seal(socket, ALERT, Some(&CLOSE_NOTIFY), &mut |_| false);
        if sealed.is_ok() {
            // A peer that reads no more sees a truncated connection, which is what it is then.
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
        // The last byte: the peer need not renew its own.
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
    /// Reads plain bytes into `out`, at most one record's; 0 after the peer's close_notify. An
    /// error of the socket (a timeout) loses nothing: call again. `Interrupted` means that bytes
    /// arrived, but not yet a whole record, so that the caller can check its deadline.
    ///
    /// # Errors
    /// The socket's; `UnexpectedEof` when it ends without close_notify; a wrapped [`TlsError`] for
    /// a record that does not authenticate, an alert, or anything else that is not data.
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
            return Err(broken("what comes is no record: it was damaged on the way"));
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
            // It must be the last of its record, or the rest would be under two keys.
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
