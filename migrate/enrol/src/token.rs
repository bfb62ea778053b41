//! The token: a secret, and the hash of the CA's certificate.

use crate::error::EnrolError;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{digest, SHA256};
use std::fmt;
use std::str::FromStr;

const SECRET_BYTES: usize = 16;
const HASH_BYTES: usize = 32;

/// The token that a person carries from one host to the other.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: [u8; SECRET_BYTES],
    hash: [u8; HASH_BYTES],
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Creates a token with a new secret, for the CA with this certificate (DER).
    ///
    /// # Errors
    /// The system provides no random bytes.
    pub(crate) fn new(authority: &[u8]) -> Result<Self, EnrolError> {
        let mut secret = [0; SECRET_BYTES];
        aws_lc_rs::rand::fill(&mut secret)
            .map_err(|_| EnrolError::certificate("there are no random numbers"))?;
        Ok(Self { secret, hash: hash(authority) })
    }

    /// Whether this is the certificate (DER) of the CA.
    pub(crate) fn is_of(&self, authority: &[u8]) -> bool {
        self.hash == hash(authority)
    }

    /// The secret as text, for a message.
    pub(crate) fn secret(&self) -> String {
        hex(&self.secret)
    }

    /// Whether the text is the token's secret.
    pub(crate) fn has_secret(&self, said: &str) -> bool {
        verify_slices_are_equal(self.secret().as_bytes(), said.as_bytes()).is_ok()
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.secret(), hex(&self.hash))
    }
}

impl FromStr for Token {
    type Err = EnrolError;

    fn from_str(text: &str) -> Result<Self, EnrolError> {
        let wanted = 2 * (SECRET_BYTES + HASH_BYTES);
        // Only digits are accepted: a sign or a letter of several bytes has no place.
        if text.len() != wanted || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            let length = text.len();
            return Err(EnrolError::Token(format!(
                "it has {length} bytes, a token has {wanted} hexadecimal digits"
            )));
        }
        let byte =
            |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap_or_default();
        Ok(Self {
            secret: std::array::from_fn(byte),
            hash: std::array::from_fn(|at| byte(SECRET_BYTES + at)),
        })
    }
}

fn hash(authority: &[u8]) -> [u8; HASH_BYTES] {
    digest(&SHA256, authority).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_being_written_down_and_nothing_else_is_one() {
        let token = Token::new(b"a CA").unwrap();
        let text = token.to_string();
        let again: Token = text.parse().unwrap();
        assert!(again == token && again.is_of(b"a CA") && !again.is_of(b"another"));
        assert!(again.has_secret(&token.secret()));
        assert!(!again.has_secret("") && !again.has_secret(&Token::new(b"").unwrap().secret()));
        for bad in ["", &text[1..], &format!("{text}0"), &text.replace(&text[..1], "+")] {
            assert!(bad.parse::<Token>().is_err(), "{bad}");
        }
        assert!("\u{e9}".repeat(48).parse::<Token>().is_err());
        assert_eq!(format!("{token:?}"), "Token", "no secret in a log");
    }
}
