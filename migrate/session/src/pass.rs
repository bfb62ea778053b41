//! The pass: the first bytes of a further link of a session, before TLS (W5a). With it the server
//! distinguishes the link from a stranger's connection without a handshake.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a pass.
pub const PASS_BYTES: usize = 64;

/// No TLS record and no preamble begins like this.
const MAGIC: [u8; 8] = *b"RELINK\r\n";
/// Where the session, the number and the code begin.
const SESSION: usize = 8;
const NUMBER: usize = 24;
const CODE: usize = 32;

/// A pass as received; only [`Pass::is_of`] checks whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pass {
    /// The session, as in the hello.
    pub session: String,
    /// Larger in each pass of a session.
    pub number: u64,
    bytes: [u8; PASS_BYTES],
}

impl Pass {
    /// Whether a connection that begins with `byte` may begin with a pass.
    pub fn may_begin_with(byte: u8) -> bool {
        byte == MAGIC[0]
    }

    /// Reads a pass; `None` if the bytes are none.
    pub fn from_bytes(bytes: &[u8; PASS_BYTES]) -> Option<Self> {
        if bytes[..SESSION] != MAGIC {
            return None;
        }
        let session = bytes[SESSION..NUMBER].iter().map(|byte| format!("{byte:02x}")).collect();
        let number = bytes[NUMBER..CODE].try_into().ok().map(u64::from_be_bytes)?;
        Some(Self { session, number, bytes: *bytes })
    }

    /// Whether the owner of `token` has made this pass.
    pub fn is_of(&self, token: &str) -> bool {
        tls::has_mac(token.as_bytes(), &self.bytes[..CODE], &self.bytes[CODE..])
    }
}

/// A pass for `session`, with a number larger than those of this process before; `None` when the
/// session's identifier is not one.
pub(crate) fn new(session: &str, token: &str) -> Option<[u8; PASS_BYTES]> {
    static NUMBER_OF_LAST: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER_OF_LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let mut bytes = [0; PASS_BYTES];
    bytes[..SESSION].copy_from_slice(&MAGIC);
    let is_id = session.len() == 32 && session.bytes().all(|digit| digit.is_ascii_hexdigit());
    let id = u128::from_str_radix(session, 16).ok().filter(|_| is_id)?;
    bytes[SESSION..NUMBER].copy_from_slice(&id.to_be_bytes());
    bytes[NUMBER..CODE].copy_from_slice(&number.to_be_bytes());
    let code = tls::mac(token.as_bytes(), &bytes[..CODE]);
    bytes[CODE..].copy_from_slice(&code);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_of_the_token_s_owner_and_no_bit_of_it_can_be_changed() {
        let session = "00112233445566778899aabbccddeeff";
        let bytes = new(session, "token").unwrap();
        let pass = Pass::from_bytes(&bytes).unwrap();
        assert_eq!(pass.session, session);
        assert!(pass.is_of("token") && !pass.is_of("another"));
        for bit in 0..8 * PASS_BYTES {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!Pass::from_bytes(&bytes).is_some_and(|pass| pass.is_of("token")), "{bit}");
        }
        assert!(Pass::may_begin_with(bytes[0]));
        // A TLS record; a preamble.
        assert!(!Pass::may_begin_with(22) && !Pass::may_begin_with(b'P'));
    }

    #[test]
    fn the_numbers_of_passes_rise() {
        let session = "f".repeat(32);
        let number = || Pass::from_bytes(&new(&session, "token").unwrap()).unwrap().number;
        let mut last = 0;
        for _ in 0..100 {
            let next = number();
            assert!(next > last, "{next} follows {last}");
            last = next;
        }
    }

    #[test]
    fn an_unknown_session_has_no_pass() {
        for session in ["", "f", &"g".repeat(32), &format!("+{}", "f".repeat(31))] {
            assert!(new(session, "token").is_none(), "{session}");
        }
    }
}
