//! The two sides of a handshake: protocol versions, and the certificates accepted.

use crate::channel::Channel;
use crate::error::TlsError;
use crate::files::Credentials;
use crate::fingerprint::Fingerprint;
use crate::handshake;
use crate::peer::{parse_name, presented};
use crate::provider::provider;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::{verify_server_name, Resumption, UnbufferedClientConnection};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, UnbufferedServerConnection, WebPkiClientVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The client's side.
#[derive(Debug, Clone)]
pub struct Connector {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    revoked: Arc<[Fingerprint]>,
}

impl Connector {
    /// Creates the client's side for links to a server that must authenticate as `name` (a host
    /// name or an address).
    ///
    /// # Errors
    /// `name` cannot be in a certificate.
    pub fn new(credentials: &Credentials, name: &str) -> Result<Self, TlsError> {
        let name = parse_name(name)?;
        let refused = |error: Error| TlsError::Broken { reason: error.to_string() };
        let mut config = ClientConfig::builder_with_provider(Arc::new(provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(refused)?
            .with_root_certificates(credentials.roots.clone())
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(credentials.key.clone())));
        config.resumption = Resumption::disabled();
        // Allows `handshake` to take the keys out of rustls.
        config.enable_secret_extraction = true;
        Ok(Self { config: Arc::new(config), name, revoked: credentials.revoked.clone() })
    }

    /// Runs the handshake on a new connection; all of it must finish by `deadline`. `peer` is for
    /// messages.
    ///
    /// # Errors
    /// The peer does not speak TLS, has the wrong identity, or closes the connection.
    pub fn connect(
        &self,
        socket: &TcpStream,
        peer: &str,
        deadline: Instant,
    ) -> Result<Channel, TlsError> {
        let failed = |error: Error| TlsError::Broken { reason: error.to_string() };
        let connection = UnbufferedClientConnection::new(self.config.clone(), self.name.clone());
        let channel =
            handshake::run(connection.map_err(failed)?, socket, peer, deadline, |error| {
                crate::error::describe(error)
            })?;
        // This is checked before the first byte of data. The server sees the connection end.
        let fingerprint = channel.peer.fingerprint();
        if self.revoked.contains(&fingerprint) {
            let reason = revoked(fingerprint, &channel.peer.names);
            return Err(TlsError::Refused { peer: peer.into(), reason });
        }
        Ok(channel)
    }
}

/// The server's side.
#[derive(Debug, Clone)]
pub struct Acceptor {
    provider: Arc<CryptoProvider>,
    resolver: Arc<SingleCertAndKey>,
    chain: Arc<dyn ClientCertVerifier>,
    allowed: Arc<[ServerName<'static>]>,
    revoked: Arc<[Fingerprint]>,
}

impl Acceptor {
    /// Creates the server's side. It accepts clients with a certificate of the CA: all of them, or,
    /// if `allowed` is not empty, those whose certificate has one of its names.
    ///
    /// # Errors
    /// A name cannot be in a certificate.
    pub fn new(credentials: &Credentials, allowed: &[String]) -> Result<Self, TlsError> {
        let provider = Arc::new(provider());
        let roots = credentials.roots.clone();
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| TlsError::Broken { reason: error.to_string() })?;
        let allowed: Result<Vec<_>, _> = allowed.iter().map(|name| parse_name(name)).collect();
        let resolver = Arc::new(SingleCertAndKey::from(credentials.key.clone()));
        let (allowed, revoked) = (allowed?.into(), credentials.revoked.clone());
        Ok(Self { provider, resolver, chain, allowed, revoked })
    }

    /// Runs the handshake on a new connection; all of it must finish by `deadline`. `peer` is for
    /// messages.
    ///
    /// # Errors
    /// The peer does not speak TLS 1.3, shows no certificate or one that is not allowed, or closes
    /// the connection.
    pub fn accept(
        &self,
        socket: &TcpStream,
        peer: &str,
        deadline: Instant,
    ) -> Result<Channel, TlsError> {
        let failed = |error: Error| TlsError::Broken { reason: error.to_string() };
        // A verifier for this handshake alone, so that it can store the reason of a refusal.
        let verifier = Arc::new(NamedClients {
            chain: self.chain.clone(),
            allowed: self.allowed.clone(),
            revoked: self.revoked.clone(),
            refused: OnceLock::new(),
        });
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(failed)?
            .with_client_cert_verifier(verifier.clone())
            .with_cert_resolver(self.resolver.clone());
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        let connection = UnbufferedServerConnection::new(Arc::new(config)).map_err(failed)?;
        handshake::run(connection, socket, peer, deadline, |error| {
            verifier.refused.get().cloned().unwrap_or_else(|| crate::error::describe(error))
        })
    }
}

/// The text for the refusal of a revoked certificate.
fn revoked(fingerprint: Fingerprint, names: &[String]) -> String {
    format!("its certificate for {}, {fingerprint}, is revoked", names.join(", "))
}

/// Lists names for a message; a configuration may have more than fit in a line.
fn listed(names: &[ServerName<'_>]) -> String {
    const MOST: usize = 8;
    let shown: Vec<_> = names.iter().take(MOST).map(ServerName::to_str).collect();
    match names.len().saturating_sub(MOST) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Requires a chain to the CA, an allowed name, and a certificate that is not revoked.
#[derive(Debug)]
struct NamedClients {
    chain: Arc<dyn ClientCertVerifier>,
    allowed: Arc<[ServerName<'static>]>,
    revoked: Arc<[Fingerprint]>,
    /// Why a certificate of the CA was refused.
    refused: OnceLock<String>,
}

impl ClientCertVerifier for NamedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // With hints, a client whose certificate is from another CA would send none, and get a less
        // precise error.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let fingerprint = Fingerprint::of(end_entity);
        if self.revoked.contains(&fingerprint) {
            let _ = self.refused.set(revoked(fingerprint, &presented(end_entity)));
            return Err(Error::InvalidCertificate(CertificateError::Revoked));
        }
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let fits = |name: &ServerName<'_>| verify_server_name(&parsed, name).is_ok();
        if self.allowed.is_empty() || self.allowed.iter().any(fits) {
            return Ok(verified);
        }
        let _ = self.refused.set(format!(
            "its certificate is for {}; allowed here: {}",
            presented(end_entity).join(", "),
            listed(&self.allowed)
        ));
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
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
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
