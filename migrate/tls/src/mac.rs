//! A message authentication code: HMAC-SHA256.

use aws_lc_rs::hmac::{sign, verify, Key, HMAC_SHA256};

/// Bytes of a code.
pub const MAC_BYTES: usize = 32;

/// The authentication code of `message` under `key`.
#[must_use]
pub fn mac(key: &[u8], message: &[u8]) -> [u8; MAC_BYTES] {
    let tag = sign(&Key::new(HMAC_SHA256, key), message);
    tag.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// Whether `code` is the code of `message` under `key`, in constant time.
#[must_use]
pub fn has_mac(key: &[u8], message: &[u8], code: &[u8]) -> bool {
    verify(&Key::new(HMAC_SHA256, key), message, code).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 2.
    #[test]
    fn hmac_matches_the_vectors_of_the_rfc() {
        let code = mac(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(code[..4], [0x5b, 0xdc, 0xc1, 0x46]);
        assert_eq!(code[28..], [0x64, 0xec, 0x38, 0x43]);
        assert!(has_mac(b"Jefe", b"what do ya want for nothing?", &code));
        assert!(!has_mac(b"Jeff", b"what do ya want for nothing?", &code));
        assert!(!has_mac(b"Jefe", b"what do ya want for nothing!", &code));
        assert!(!has_mac(b"Jefe", b"what do ya want for nothing?", &code[..31]));
    }
}
