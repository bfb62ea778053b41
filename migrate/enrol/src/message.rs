//! Messages: a length and JSON.

use crate::error::EnrolError;
use serde::{de::DeserializeOwned, Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The largest message. A configuration of 64 hosts has some 10 KiB.
const MOST: u32 = 64 << 10;
/// How long a connection may take, from its begin until the new host has its certificate.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How long the new host may take to write its files.
pub(crate) const WRITING: Duration = Duration::from_secs(60);

/// Request of the new host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Request {
    pub(crate) secret: String,
    /// A point of P-256, hexadecimal.
    pub(crate) public_key: String,
    /// The key's signature of [`SIGNED`] and the secret, ASN.1, hexadecimal.
    pub(crate) signature: String,
}

/// Prefix of the bytes that the key signs; the secret follows.
pub(crate) const SIGNED: &str = "platen enrol 1\n";

/// Answer of the host of the CA.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Answer {
    /// The reason of a refusal.
    pub(crate) error: Option<String>,
    /// The CA's certificate, PEM.
    pub(crate) authority: String,
    /// The host's certificate, PEM.
    pub(crate) certificate: String,
    /// The host's names; the first is its name.
    pub(crate) names: Vec<String>,
    /// The text of platen.toml.
    pub(crate) configuration: Option<String>,
}

/// Last message of the new host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Outcome {
    /// Whether the new host's files are written.
    pub(crate) written: bool,
    /// Why they are not.
    #[serde(default)]
    pub(crate) error: Option<String>,
}

/// Quotes text of the other end for a message: escaped, and cut.
pub(crate) fn quoted(words: &str) -> String {
    words.escape_debug().take(500).collect()
}

/// A connection that ends in time, however slowly the other end sends.
#[derive(Debug)]
pub(crate) struct Bounded {
    socket: TcpStream,
    until: Instant,
}

impl Bounded {
    pub(crate) fn new(socket: TcpStream) -> Self {
        Self { socket, until: Instant::now() + PATIENCE }
    }

    /// Gives the connection this much time from now on.
    pub(crate) fn extend(&mut self, time: Duration) {
        self.until = Instant::now() + time;
    }

    fn left(&self) -> std::io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(ErrorKind::TimedOut.into())
        } else {
            Ok(left)
        }
    }
}

impl Read for Bounded {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.socket.set_read_timeout(Some(self.left()?))?;
        self.socket.read(into)
    }
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.socket.set_write_timeout(Some(self.left()?))?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.socket.flush()
    }
}

pub(crate) fn send<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), EnrolError> {
    let bytes = encode(message)?;
    let lost = EnrolError::connection("the connection was lost");
    to.write_all(&bytes).and_then(|()| to.flush()).map_err(lost)
}

/// The bytes of a message.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, EnrolError> {
    let json = serde_json::to_vec(message)
        .map_err(|error| EnrolError::Message(format!("a message that cannot be sent: {error}")))?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length <= MOST);
    let Some(length) = length else {
        let (got, most) = (json.len(), MOST);
        return Err(EnrolError::Message(format!("a message of {got} bytes, limit {most}")));
    };
    Ok([&length.to_be_bytes()[..], &json].concat())
}

pub(crate) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, EnrolError> {
    let lost = || EnrolError::connection("the connection was lost");
    let mut length = [0; 4];
    from.read_exact(&mut length).map_err(lost())?;
    let length = u32::from_be_bytes(length);
    if length > MOST {
        return Err(EnrolError::Message(format!("a message of {length} bytes, limit {MOST}")));
    }
    let mut json = vec![0; length as usize];
    from.read_exact(&mut json).map_err(lost())?;
    serde_json::from_slice(&json)
        .map_err(|error| EnrolError::Message(format!("a message that is not understood: {error}")))
}

/// The bytes of hexadecimal digits.
pub(crate) fn unhex(text: &str) -> Result<Vec<u8>, EnrolError> {
    let wrong = || EnrolError::Message("a number that is not hexadecimal".into());
    if !text.len().is_multiple_of(2) || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| wrong());
    (0..text.len()).step_by(2).map(byte).collect()
}
