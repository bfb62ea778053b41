//! The exchange that opens a link: preamble, hello and welcome (W1 to W5).

use crate::error::SessionError;
use crate::history::Histories;
use crate::transport::Link;
use serde::{de::DeserializeOwned, Deserialize, Serialize};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use tls::TlsError;

/// The protocol version of this build (W1).
pub const VERSION: u16 = 2;
/// How long a peer may take for its half of the hello (W5).
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for bytes. One that takes more than twice as long shows that this host stood
/// still.
const WAIT: Duration = Duration::from_millis(500);
/// The shortest: zero would mean no time-out.
const A_MOMENT: Duration = Duration::from_millis(1);
const MAGIC: [u8; 8] = *b"PLATEN\r\n";
const MAX_JSON: usize = 8192;
const PREAMBLE_BYTES: usize = 20;
const CLOSED: &str = "closed during the hello";

/// The most links a session has.
pub const MAX_LINKS: u16 = 64;

/// Settings for the destination QEMU's monitor, so that both QEMUs agree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Setup {
    /// QEMU's multifd-channels; 0 for a single stream.
    pub channels: u8,
    /// QEMU's return-path capability.
    pub return_path: bool,
    /// The migration may turn to postcopy: QEMU's postcopy-ram capability is switched on. False
    /// leaves it as it is.
    pub postcopy: bool,
}

impl Setup {
    /// The settings for a single stream with a return path.
    pub fn with_return_path() -> Self {
        Self { return_path: true, ..Self::default() }
    }
}

/// The client's half (W2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// 32 hex digits, chosen at random by the client.
    pub session: String,
    /// This link's number.
    pub link: u16,
    /// The number of links of the session.
    pub links: u16,
    /// The server's secret; `None` on link 0.
    #[serde(default)]
    pub token: Option<String>,
    /// Page size of the guest, bytes.
    pub page_size: u32,
    /// The name of the server's target.
    #[serde(default)]
    pub name: Option<String>,
    /// Settings for the destination QEMU's monitor.
    #[serde(default)]
    pub setup: Option<Setup>,
    /// Codecs the client may use, by name.
    pub codecs: Vec<String>,
    /// Bytes of delta cache that the client requests (W29).
    #[serde(default)]
    pub delta_cache: u64,
    /// The histories that the client asks for (W29a).
    #[serde(default)]
    pub histories: Option<Histories>,
    /// The client takes offers of pages that the server has already, of at most this many in all
    /// (W29b).
    #[serde(default)]
    pub seed: u32,
    /// Opens no link: the client's session has ended without an answer, and this asks how far the
    /// server's session got (W28).
    #[serde(default)]
    pub ask: bool,
    /// The client opens link 0 again where the welcome says so (W4a).
    #[serde(default)]
    pub again: bool,
    /// The server takes a pass before TLS (W5a). Not sent.
    #[serde(skip)]
    pub pass: bool,
}

impl Hello {
    /// The only link of a new session, for a guest with pages of this size. It names no target and
    /// asks for nothing.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn of_one_link(page_size: u32) -> Result<Self, SessionError> {
        Ok(Self {
            session: random_id()?,
            link: 0,
            links: 1,
            token: None,
            page_size,
            name: None,
            setup: None,
            codecs: Vec::new(),
            delta_cache: 0,
            histories: None,
            seed: 0,
            ask: false,
            again: false,
            pass: false,
        })
    }
}

/// The server's half (W3).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Welcome {
    /// The reason for a refusal.
    pub error: Option<String>,
    /// With an error, if the session has ended: whether bytes of W20 were written.
    pub committed: Option<bool>,
    /// With `committed`: whether QEMU confirmed.
    pub confirmed: bool,
    /// With `committed`: whether QEMU has loaded the packaged state of postcopy (W20c).
    pub loaded: bool,
    /// With `committed`: the server waits for QEMU, and has a better answer later.
    pub pending: bool,
    /// The server obeys W20c.
    pub pong: bool,
    /// The secret that further links must show.
    pub token: String,
    /// The largest chunk, bytes.
    pub chunk_bytes: u32,
    /// DATA frames that each stream may have in flight on its own.
    pub stream_frames: u32,
    /// DATA frames that all streams share beyond that.
    pub shared_frames: u32,
    /// Codecs the server decodes.
    pub codecs: Vec<String>,
    /// Bytes of delta cache at either end, at most the client's request; 0 without deltas (W29).
    pub delta_cache: u64,
    /// The server obeys W29c: multifd channels may use the delta cache, too.
    pub channel_deltas: bool,
    /// The histories granted, at most those asked for; `None` without any (W29a).
    pub histories: Option<Histories>,
    /// The server has a seed, and will offer its pages (W29b).
    pub seed: bool,
    /// The server takes a pass before TLS from the session's further links (W5a).
    pub pass: bool,
    /// Another process of the server holds the session: this connection ends, and link 0 is opened
    /// again, with the token (W4a).
    pub again: bool,
}

/// 128 random bits as 32 hex digits.
///
/// # Errors
/// The system provides no random bytes.
pub fn random_id() -> Result<String, SessionError> {
    let mut bytes = [0u8; 16];
    std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).map_err(
        |source| SessionError::Resource { what: "cannot read /dev/urandom".into(), source },
    )?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

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
mod tests {
    use super::*;
    use std::net::{Shutdown, TcpListener, TcpStream};

    fn hello() -> Hello {
        let setup = Some(Setup { channels: 2, postcopy: true, ..Setup::with_return_path() });
        let codecs = vec!["zstd".into()];
        Hello { links: 4, setup, codecs, again: true, ..Hello::of_one_link(4096).unwrap() }
    }

    /// Length of a hello that is cut short and followed by silence.
    const SILENT: usize = 30;

    /// The server's result for `bytes` from a client that then closes, or stays silent.
    fn served(bytes: &[u8], close: bool) -> Result<Hello, SessionError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut link = Link::from(listener.accept().unwrap().0);
        client.write_all(bytes).unwrap();
        if close {
            client.shutdown(Shutdown::Write).unwrap();
        }
        // Silence ends only at the limit.
        let limit = if bytes.len() == SILENT { 300 } else { 60_000 };
        read_preamble(&mut link, "the client", Duration::from_millis(limit))
    }

    fn recorded() -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = Link::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut link, _) = listener.accept().unwrap();
        write_preamble(&mut client, "x", &hello()).unwrap();
        drop(client);
        let mut bytes = Vec::new();
        link.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_at_hand_are_read_as_those_of_a_link() {
        let mut bytes = recorded();
        let got: Hello = decode_preamble("x", &bytes).unwrap();
        assert_eq!(encode_preamble("x", &got).unwrap(), bytes);
        for cut in 0..bytes.len() {
            assert!(decode_preamble::<Hello>("x", &bytes[..cut]).is_err(), "cut at {cut}");
        }
        bytes.push(1);
        assert_eq!(decode_preamble::<Hello>("x", &bytes).unwrap(), got);
    }

    #[test]
    fn a_hello_that_is_too_long_is_not_sent() {
        let long = Hello { name: Some("x".repeat(MAX_JSON)), ..hello() };
        let error = encode_preamble("the server", &long).unwrap_err().to_string();
        assert!(error.contains("limit 8192"), "{error}");
    }

    #[test]
    fn a_hello_survives_the_wire() {
        let bytes = recorded();
        let got = served(&bytes, false).unwrap();
        assert_eq!(got.setup, hello().setup);
        assert_eq!(got.session.len(), 32);
    }

    #[test]
    fn a_peer_of_an_older_version_gets_no_deltas_and_no_histories() {
        let old = r#"{"session":"","link":0,"links":1,"page-size":4096,"codecs":[]}"#;
        assert_eq!(serde_json::from_str::<Hello>(old).unwrap().delta_cache, 0);
        assert_eq!(serde_json::from_str::<Welcome>("{}").unwrap().delta_cache, 0);
        assert_eq!(serde_json::from_str::<Hello>(old).unwrap().histories, None);
        assert_eq!(serde_json::from_str::<Hello>(old).unwrap().seed, 0);
        assert_eq!(serde_json::from_str::<Welcome>("{}").unwrap().histories, None);
        assert!(!serde_json::from_str::<Welcome>("{}").unwrap().channel_deltas);
    }

    #[test]
    fn cut_anywhere_it_is_refused_in_bounded_time() {
        let bytes = recorded();
        for cut in (0..bytes.len()).step_by(7) {
            assert!(served(&bytes[..cut], true).is_err(), "cut at {cut}");
        }
        assert!(served(&bytes[..SILENT], false).unwrap_err().to_string().contains("in time"));
    }

    /// As after a time for which this host stood still.
    #[test]
    fn a_hello_that_has_come_is_read_when_its_time_is_over() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let bytes = recorded();
        client.write_all(&bytes).unwrap();
        while socket.peek(&mut vec![0; bytes.len()]).unwrap() < bytes.len() {}
        read_preamble::<Hello>(&mut Link::from(socket), "the client", Duration::ZERO).unwrap();
    }

    #[test]
    fn strangers_old_versions_and_long_hellos_are_named() {
        assert!(matches!(served(b"GET / HTTP/1.1\r\n", false), Err(SessionError::Magic { .. })));
        let mut old = recorded();
        old[9] = 9;
        assert!(served(&old, false).unwrap_err().to_string().contains("version 9"));
        let mut giant = recorded();
        giant[12] = 0xff;
        assert!(served(&giant, false).unwrap_err().to_string().contains("limit 8192"));
        let mut flipped = recorded();
        flipped[40] ^= 1;
        assert!(served(&flipped, false).unwrap_err().to_string().contains("checksum"));
    }
}
