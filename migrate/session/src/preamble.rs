//! The preamble of a connection, and the JSON behind it (W1).

use crate::error::SessionError;
use crate::transport::Link;
use serde::{de::DeserializeOwned, Serialize};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tls::TlsError;

/// The protocol version of this build (W1).
pub const VERSION: u16 = 2;
/// The longest wait for bytes. One that takes more than twice as long shows that this host stood
/// still.
const WAIT: Duration = Duration::from_millis(500);
/// The shortest: zero would mean no time-out.
pub(crate) const A_MOMENT: Duration = Duration::from_millis(1);
const MAGIC: [u8; 8] = *b"PLATEN\r\n";
const MAX_JSON: usize = 8192;
const PREAMBLE_BYTES: usize = 20;
const CLOSED: &str = "closed during the hello";

/// A preamble and its JSON (W1).
///
/// # Errors
/// The JSON is longer than a peer accepts.
pub fn encode_preamble<T: Serialize>(peer: &str, body: &T) -> Result<Vec<u8>, SessionError> {
    let unusable = |detail: String| SessionError::Hello { peer: peer.into(), detail };
    let json = serde_json::to_vec(body).map_err(|error| unusable(error.to_string()))?;
    let length =
        u32::try_from(json.len()).ok().filter(|_| json.len() <= MAX_JSON).ok_or_else(|| {
            unusable(format!("it would have {} bytes of JSON, limit {MAX_JSON}", json.len()))
        })?;
    let mut out = Vec::with_capacity(PREAMBLE_BYTES + json.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_be_bytes());
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&length.to_be_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&out), &json);
    out.extend_from_slice(&crc.to_be_bytes());
    out.extend_from_slice(&json);
    Ok(out)
}

/// Checks the first bytes of a preamble.
fn check_magic(peer: &str, first: [u8; MAGIC.len()]) -> Result<(), SessionError> {
    if first == MAGIC {
        return Ok(());
    }
    Err(SessionError::Magic { peer: peer.into(), first })
}

/// The length of the JSON behind `head`, at most [`MAX_JSON`].
fn json_len(peer: &str, head: &[u8; PREAMBLE_BYTES]) -> Result<usize, SessionError> {
    let version = u16::from_be_bytes([head[8], head[9]]);
    if version != VERSION {
        return Err(SessionError::Version { peer: peer.into(), got: version, ours: VERSION });
    }
    let length = u32::from_be_bytes([head[12], head[13], head[14], head[15]]) as usize;
    if length > MAX_JSON {
        let detail = format!("it states {length} bytes of JSON, limit {MAX_JSON}");
        return Err(SessionError::Hello { peer: peer.into(), detail });
    }
    Ok(length)
}

fn decode_json<T: DeserializeOwned>(
    peer: &str,
    head: &[u8; PREAMBLE_BYTES],
    json: &[u8],
) -> Result<T, SessionError> {
    let stated = u32::from_be_bytes([head[16], head[17], head[18], head[19]]);
    let computed = crc32c::crc32c_append(crc32c::crc32c(&head[..16]), json);
    if stated != computed {
        let detail = format!("it has checksum {stated:#010x}, computed {computed:#010x}");
        return Err(SessionError::Hello { peer: peer.into(), detail });
    }
    serde_json::from_slice(json)
        .map_err(|error| SessionError::Hello { peer: peer.into(), detail: error.to_string() })
}

/// Reads a preamble and its JSON from the front of `bytes`; ignores the bytes behind it.
///
/// # Errors
/// The errors of [`read_preamble`]; and `bytes` that end too soon.
pub fn decode_preamble<T: DeserializeOwned>(peer: &str, bytes: &[u8]) -> Result<T, SessionError> {
    let cut = || SessionError::LinkLost { peer: peer.into(), detail: CLOSED.into() };
    check_magic(peer, *bytes.first_chunk().ok_or_else(cut)?)?;
    let (head, rest) = bytes.split_first_chunk().ok_or_else(cut)?;
    let json = rest.get(..json_len(peer, head)?).ok_or_else(cut)?;
    decode_json(peer, head, json)
}

/// Writes a preamble and its JSON in one piece.
///
/// # Errors
/// The link is lost, or the JSON is longer than a peer accepts.
pub fn write_preamble<T: Serialize>(
    link: &mut Link,
    peer: &str,
    body: &T,
) -> Result<(), SessionError> {
    let bytes = encode_preamble(peer, body)?;
    link.write_all(&bytes).map_err(|error| lost(peer, &error))
}

/// Reads a preamble and its JSON; all of it must arrive within `timeout`, of which the time for
/// which this host stands still counts little.
///
/// # Errors
/// Anything other than a preamble of our version with valid JSON.
pub fn read_preamble<T: DeserializeOwned>(
    link: &mut Link,
    peer: &str,
    timeout: Duration,
) -> Result<T, SessionError> {
    let mut left = timeout;
    let mut head = [0; PREAMBLE_BYTES];
    // The magic first, on its own: a port scanner that sends eight wrong bytes is refused at once.
    let (first, rest) = head.split_at_mut(MAGIC.len());
    read_by(link, peer, first, &mut left)?;
    check_magic(peer, *first.first_chunk().expect("as long as the magic"))?;
    read_by(link, peer, rest, &mut left)?;
    let mut json = vec![0; json_len(peer, &head)?];
    read_by(link, peer, &mut json, &mut left)?;
    decode_json(peer, &head, &json)
}

/// Reads as long as there is time left, and then what has come already.
fn read_by(
    link: &mut Link,
    peer: &str,
    out: &mut [u8],
    left: &mut Duration,
) -> Result<(), SessionError> {
    let mut done = 0;
    while done < out.len() {
        let wait = (*left).clamp(A_MOMENT, WAIT);
        link.socket().set_read_timeout(Some(wait)).map_err(|error| lost(peer, &error))?;
        let begun = Instant::now();
        let got = link.read(&mut out[done..]);
        *left = left.saturating_sub(begun.elapsed().min(2 * WAIT));
        match got {
            Ok(0) => {
                return Err(SessionError::LinkLost { peer: peer.into(), detail: CLOSED.into() })
            }
            Ok(n) => done += n,
            Err(error) if would_block(&error) && left.is_zero() => {
                let detail = format!("only {done} of {} bytes came in time", out.len());
                return Err(SessionError::Hello { peer: peer.into(), detail });
            }
            Err(error) if would_block(&error) => {}
            Err(error) => return Err(lost(peer, &error)),
        }
    }
    Ok(())
}

/// Whether a read or write only reached its timeout.
pub(crate) fn would_block(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

pub(crate) fn lost(peer: &str, error: &std::io::Error) -> SessionError {
    // The server checks a client's certificate after the handshake is over for the client.
    if let Some(TlsError::Broken { reason }) = TlsError::of(error) {
        return TlsError::Refused { peer: peer.into(), reason: reason.clone() }.into();
    }
    SessionError::LinkLost { peer: peer.into(), detail: error.to_string() }
}

#[cfg(test)]
mod tests;
