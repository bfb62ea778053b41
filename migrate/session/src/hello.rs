//! The exchange that opens a link: hello and welcome (W2 to W5).

use crate::error::SessionError;
use crate::history::Histories;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::time::Duration;

/// How long a peer may take for its half of the hello (W5).
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
