//! TLS 1.3 records (RFC 8446, section 5): their form, and the keys of one direction.
//!
//! A record is a header of 5 bytes (23, 3, 3, length) and an AEAD ciphertext of plain bytes, their
//! real type and a tag of 16 bytes. The header is the additional data; the nonce is the direction's
//! IV combined with the record's number. Keys, IVs and their successors come from rustls.

use crate::error::TlsError;
use aws_lc_rs::aead::{
    Aad, Algorithm, LessSafeKey, Nonce, UnboundKey, AES_128_GCM, AES_256_GCM, CHACHA20_POLY1305,
};
use rustls::{ConnectionTrafficSecrets, Error};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

pub(crate) const RECORD_HEADER: usize = 5;
/// The most plain bytes of a record.
pub(crate) const MAX_PLAIN: usize = 1 << 14;
/// The most bytes behind a header: plain bytes, type and padding, tag, and the standard's reserve.
pub(crate) const MAX_RECORD_BODY: usize = MAX_PLAIN + 256;
pub(crate) const TAG: usize = 16;
/// Bytes of a record on the wire besides its plain bytes.
pub(crate) const OVERHEAD: usize = RECORD_HEADER + 1 + TAG;

pub(crate) const ALERT: u8 = 21;
pub(crate) const HANDSHAKE: u8 = 22;
pub(crate) const DATA: u8 = 23;
pub(crate) const KEY_UPDATE: u8 = 24;

/// The source of new keys.
pub(crate) trait KeySource: Send {
    fn next_tx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
    fn next_rx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
}

/// The state that the two directions share. The lock is held for a key derivation, never during a
/// system call.
pub(crate) struct Common {
    keys: Mutex<Box<dyn KeySource>>,
    /// Whether the peer has new keys and requests new ones of this end.
    pub(crate) answer: AtomicBool,
}

impl Common {
    pub(crate) fn new(keys: Box<dyn KeySource>) -> Self {
        Self { keys: Mutex::new(keys), answer: AtomicBool::new(false) }
    }

    pub(crate) fn next<T>(&self, of: impl FnOnce(&mut dyn KeySource) -> T) -> T {
        of(&mut **self.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) fn broken(reason: &str) -> TlsError {
    TlsError::Broken { reason: reason.into() }
}

/// The keys of one direction.
pub(crate) struct Half {
    pub(crate) key: LessSafeKey,
    iv: [u8; 12],
    /// Records so far under this key. A number is never used twice: `Writer` renews the key long
    /// before the number could wrap.
    pub(crate) number: u64,
}

impl Half {
    pub(crate) fn new(
        (number, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, TlsError> {
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

    pub(crate) fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= number;
        }
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Seals one record into the front of `out`; returns its length on the wire.
    pub(crate) fn seal(
        &mut self,
        kind: u8,
        plain: &[u8],
        out: &mut [u8],
    ) -> Result<usize, TlsError> {
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
