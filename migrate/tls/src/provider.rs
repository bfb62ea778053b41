//! The cipher suites and key exchanges of a link, and the check of a certificate with them.

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{aws_lc_rs as suites, CryptoProvider};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{Error, RootCertStore};

/// Uses aws-lc explicitly, whatever the default of the process is. AES-128 comes first: it is a
/// quarter less work than AES-256, and still unbreakable in practice. The key exchange resists a
/// quantum computer that later decrypts recordings of today, since guest memory holds keys.
pub(crate) fn provider() -> CryptoProvider {
    let mut provider = suites::default_provider();
    provider.cipher_suites = vec![
        suites::cipher_suite::TLS13_AES_128_GCM_SHA256,
        suites::cipher_suite::TLS13_AES_256_GCM_SHA384,
        suites::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    provider.kx_groups = vec![
        suites::kx_group::X25519MLKEM768,
        suites::kx_group::X25519,
        suites::kx_group::SECP256R1,
        suites::kx_group::SECP384R1,
    ];
    provider
}

/// Checks this end's own certificate `chain` against its own CA, as a server's, at a time.
pub(crate) fn check(
    chain: &[CertificateDer<'_>],
    roots: &RootCertStore,
    at: UnixTime,
) -> Result<(), Error> {
    let Some((own, between)) = chain.split_first() else {
        return Err(Error::NoCertificatesPresented);
    };
    verify_server_cert_signed_by_trust_anchor(
        &ParsedCertificate::try_from(own)?,
        roots,
        between,
        at,
        provider().signature_verification_algorithms.all,
    )
}
