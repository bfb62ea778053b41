//! The number that identifies a certificate's key, and by which it is revoked.

use aws_lc_rs::digest::{digest, SHA256};
use rustls::pki_types::CertificateDer;
use rustls::server::ParsedCertificate;
use std::fmt;
use std::str::FromStr;

/// Bytes of a SHA-256.
const BYTES: usize = 32;

/// The SHA-256 of a certificate's public key (SubjectPublicKeyInfo, DER): hexadecimal digits, two
/// by two, with colons between them.
///
/// It is not the hash of the whole certificate: anyone who has a certificate can give its ECDSA
/// signature another valid form, and thereby its bytes another hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; BYTES]);

impl Fingerprint {
    /// The fingerprint of a certificate, DER.
    #[must_use]
    pub fn of(certificate: &[u8]) -> Self {
        let der = CertificateDer::from(certificate);
        let key = ParsedCertificate::try_from(&der).map(|parsed| parsed.subject_public_key_info());
        // No handshake succeeds with a certificate that cannot be parsed.
        let hash = key.map_or_else(|_| digest(&SHA256, certificate), |key| digest(&SHA256, &key));
        Self(hash.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let colon = if at > 0 { ":" } else { "" };
            write!(f, "{colon}{byte:02X}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    /// Takes digits of either case, with colons or without.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            let shown: String = text.chars().take(100).collect();
            format!(
                "'{}' is no SHA-256 of a public key, {BYTES} bytes in hexadecimal, as `platen doctor` \
                 and the CA's list `issued` show it",
                shown.escape_debug()
            )
        };
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b':').collect();
        if digits.len() != 2 * BYTES || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong());
        }
        let mut bytes = [0; BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_read_with_colons_and_without_and_nothing_else_is_one() {
        let one = Fingerprint::of(b"abc");
        let text = one.to_string();
        // FIPS 180-2, appendix B.1.
        assert!(text.starts_with("BA:78:16:BF:8F:01:CF:EA:") && text.ends_with(":00:15:AD"));
        for text in [text.clone(), text.replace(':', ""), text.to_lowercase()] {
            assert_eq!(text.parse::<Fingerprint>(), Ok(one));
        }
        for bad in ["", "BA:78", &text[3..], &format!("{text}:00"), &text.replace("BA", "+A")] {
            let said = bad.parse::<Fingerprint>().unwrap_err();
            assert!(said.contains("issued"), "{said}");
        }
        assert!("\u{e9}".repeat(32).parse::<Fingerprint>().is_err());
    }
}
