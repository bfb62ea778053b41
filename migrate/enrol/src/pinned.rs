//! The new host's check of the other end: its certificate must be of the CA whose hash the token
//! has.

use crate::token::Token;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{verify_tls13_signature, CryptoProvider};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::sync::Arc;

/// The name in the certificate of the host of the CA while it offers.
pub(crate) const NAME: &str = "enrol.platen.internal";

#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) token: Token,
    pub(crate) provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let other = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = intermediates.iter().find(|one| self.token.is_of(one)).ok_or(other)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let (roots, provider) = (Arc::new(roots), self.provider.clone());
        let checks = WebPkiServerVerifier::builder_with_provider(roots, provider)
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        checks.verify_server_cert(end_entity, &[], name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
