//! One connection to an offer: the request, the certificate, and the outcome.

use crate::connections::Connections;
use crate::error::EnrolError;
use crate::message::{
    quoted, receive, send, unhex, Answer, Bounded, Outcome, Request, SIGNED, WRITING,
};
use crate::offer::{End, Offer};
use aws_lc_rs::signature::{UnparsedPublicKey, ECDSA_P256_SHA256_ASN1};
use rcgen::{PublicKeyData, SignatureAlgorithm, PKCS_ECDSA_P256_SHA256};
use rustls::{ServerConnection, Stream};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Pause before a wrong secret is answered. The secret has 128 bits: the pause is for the CPU and
/// the log of the host of the CA, not for the secret.
const WRONG: Duration = Duration::from_secs(1);

/// A public key of another host.
struct HostKey(Vec<u8>);

impl PublicKeyData for HostKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl Offer {
    /// Serves a connection to its end.
    pub(crate) fn serve(
        &self,
        socket: TcpStream,
        connections: &Connections,
        number: u64,
    ) -> Result<(), EnrolError> {
        let failed = || EnrolError::connection("the connection was lost");
        socket.set_nonblocking(false).map_err(failed())?;
        let mut socket = Bounded::new(socket);
        let mut connection =
            ServerConnection::new(self.config.clone()).map_err(EnrolError::certificate)?;
        let mut stream = Stream::new(&mut connection, &mut socket);
        let request: Request = receive(&mut stream)?;
        let answer = match self.answer(&request, || connections.set_proven(number)) {
            Ok(answer) => answer,
            Err(refusal) => {
                if matches!(refusal, Refusal::Secret) {
                    connections.pause(number, WRONG);
                }
                let error = EnrolError::from(refusal);
                let refused = Answer { error: Some(error.to_string()), ..Answer::default() };
                let _ = send(&mut stream, &refused);
                return Err(error);
            }
        };
        let sent = send(&mut stream, &answer);
        stream.sock.extend(WRITING);
        let outcome = sent.and_then(|()| receive::<Outcome>(&mut stream));
        self.progress().end = Some(match outcome {
            Ok(Outcome { written: true, .. }) => End::Joined,
            Ok(Outcome { error, .. }) => {
                End::NotWritten(quoted(&error.unwrap_or_else(|| "it says not why".into())))
            }
            Err(error) => End::Lost(error.to_string()),
        });
        Ok(())
    }

    /// Signs the certificate, once. `prove` records that the secret is right; it returns false if
    /// the connection was closed.
    fn answer(&self, request: &Request, prove: impl FnOnce() -> bool) -> Result<Answer, Refusal> {
        // The lock is held until the certificate is signed, so that only one is signed.
        let mut progress = self.progress();
        let refused = |why: &str| Err(Refusal::Other(EnrolError::Message(why.into())));
        if Instant::now() >= self.until {
            return refused("the offer has ended");
        }
        if !self.token.has_secret(&request.secret) {
            return Err(Refusal::Secret);
        }
        if progress.issued.is_some() {
            return refused("the token was used already");
        }
        let key = unhex(&request.public_key)?;
        let signed = format!("{SIGNED}{}", request.secret);
        let signature = unhex(&request.signature)?;
        let known = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &key);
        if known.verify(signed.as_bytes(), &signature).is_err() {
            return refused("the request is not signed by its key");
        }
        if !prove() {
            return refused("the connection was closed for another one");
        }
        let certificate = self.authority.sign(&self.names, self.days, &HostKey(key));
        let certificate = certificate.map_err(EnrolError::from)?;
        let issued = self.authority.record(&certificate).map_err(EnrolError::from)?;
        progress.issued = Some(issued);
        Ok(self.with(certificate))
    }

    /// Makes the answer with this certificate.
    pub(crate) fn with(&self, certificate: String) -> Answer {
        Answer {
            error: None,
            authority: self.authority_pem.clone(),
            certificate,
            names: self.names.clone(),
            configuration: self.configuration.clone(),
        }
    }
}

/// Why a request gets no certificate.
enum Refusal {
    /// The secret of the request is wrong.
    Secret,
    Other(EnrolError),
}

impl From<EnrolError> for Refusal {
    fn from(error: EnrolError) -> Self {
        Self::Other(error)
    }
}

impl From<Refusal> for EnrolError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Secret => Self::Message("the secret of the token is wrong".into()),
            Refusal::Other(error) => error,
        }
    }
}
