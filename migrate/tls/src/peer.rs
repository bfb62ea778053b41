//! The names in certificates.

use crate::error::{names, TlsError};
use crate::fingerprint::Fingerprint;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, Error};

/// The certificate at the other end of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The host names and addresses in the certificate.
    pub names: Vec<String>,
    certificate: CertificateDer<'static>,
}

impl Peer {
    pub(crate) fn new(certificate: &CertificateDer<'_>) -> Self {
        Self { names: presented(certificate), certificate: certificate.clone().into_owned() }
    }

    /// The certificate, DER, for another process of this host.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// The fingerprint of the certificate.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    /// The owner of a certificate that another process of this host has verified.
    pub fn of_certificate(der: &[u8]) -> Self {
        Self::new(&CertificateDer::from(der))
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.names.first() {
            Some(name) => f.write_str(name),
            None => f.write_str("a certificate without names"),
        }
    }
}

/// The names of a certificate; webpki lists them in the error for a name that it does not have.
pub(crate) fn presented(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return Vec::new() };
    let Ok(nobody) = ServerName::try_from("no-such-name.invalid") else { return Vec::new() };
    match verify_server_name(&parsed, &nobody) {
        Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext {
            presented,
            ..
        })) => names(&presented),
        _ => Vec::new(),
    }
}

/// Whether a certificate can be for this name: a host name or an address.
#[must_use]
pub fn is_name(name: &str) -> bool {
    parse_name(name).is_ok()
}

/// Parses a name that can be in a certificate.
pub(crate) fn parse_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_string()).map_err(|_| TlsError::Name { name: name.into() })
}
