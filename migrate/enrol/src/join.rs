//! The new host's end.

use crate::error::EnrolError;
use crate::message::{quoted, receive, send, Answer, Bounded, Outcome, Request, PATIENCE, SIGNED};
use crate::pinned::{Pinned, NAME};
use crate::token::{hex, Token};
use rcgen::{KeyPair, PublicKeyData, SigningKey};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, Stream};
use std::io::{Error, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;

/// Result of an enrolment, at the new host.
#[derive(Debug)]
pub struct Joined {
    /// The names in the host's certificate; the first is its name.
    pub names: Vec<String>,
    /// The host's key, which was made here, PEM.
    pub key: String,
    /// The host's certificate, PEM.
    pub certificate: String,
    /// The CA's certificate, PEM.
    pub authority: String,
    /// The text of the configuration, if the host of the CA has one.
    pub configuration: Option<String>,
}

/// The connection to the host of the CA, which waits for the report that the files are written.
#[must_use = "the host of the CA waits for it"]
pub struct Reply {
    connection: ClientConnection,
    socket: Bounded,
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reply")
    }
}

impl Reply {
    /// Tells the host of the CA that the files are written.
    ///
    /// # Errors
    /// The connection was lost: that host does not know that this one has joined.
    pub fn written(self) -> Result<(), EnrolError> {
        self.send(&Outcome { written: true, error: None })
    }

    /// Tells the host of the CA why the files are not written.
    ///
    /// # Errors
    /// The connection was lost.
    pub fn failed(self, why: &str) -> Result<(), EnrolError> {
        self.send(&Outcome { written: false, error: Some(why.chars().take(500).collect()) })
    }

    fn send(mut self, outcome: &Outcome) -> Result<(), EnrolError> {
        self.socket.extend(PATIENCE);
        send(&mut Stream::new(&mut self.connection, &mut self.socket), outcome)
    }
}

/// Asks the host at `address`, HOST:PORT, for a certificate for a new key. That host then waits for
/// the [`Reply`], for a minute at most.
///
/// # Errors
/// The host cannot be reached, is not the host of the token's CA, or refuses.
pub fn join(address: &str, token: &Token) -> Result<(Joined, Reply), EnrolError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let pinned = Pinned { token: token.clone(), provider: provider.clone() };
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(EnrolError::certificate)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(pinned))
        .with_no_client_auth();
    let name = ServerName::try_from(NAME).map_err(EnrolError::certificate)?;
    let mut connection =
        ClientConnection::new(Arc::new(config), name).map_err(EnrolError::certificate)?;
    let mut socket = Bounded::new(dial(address)?);
    // No byte of the request is sent before the other end is known.
    while connection.is_handshaking() {
        connection.complete_io(&mut socket).map_err(|source| {
            let what = format!(
                "{address} is not the host of this token's CA, or offers nothing (`platen host add` \
                 runs there?)"
            );
            EnrolError::Connection { what, source }
        })?;
    }
    let key = KeyPair::generate().map_err(EnrolError::certificate)?;
    let signed = format!("{SIGNED}{}", token.secret());
    let signature = key.sign(signed.as_bytes()).map_err(EnrolError::certificate)?;
    let request = Request {
        secret: token.secret(),
        public_key: hex(key.der_bytes()),
        signature: hex(&signature),
    };
    let mut stream = Stream::new(&mut connection, &mut socket);
    send(&mut stream, &request)?;
    let answer: Answer = receive(&mut stream)?;
    if let Some(reason) = answer.error {
        return Err(EnrolError::Refused(quoted(&reason)));
    }
    let authority = CertificateDer::from_pem_slice(answer.authority.as_bytes());
    if !authority.is_ok_and(|authority| token.is_of(&authority)) {
        return Err(EnrolError::Message("it has sent the certificate of another CA".into()));
    }
    let joined = Joined {
        names: answer.names,
        key: key.serialize_pem(),
        certificate: answer.certificate,
        authority: answer.authority,
        configuration: answer.configuration,
    };
    Ok((joined, Reply { connection, socket }))
}

fn dial(address: &str) -> Result<TcpStream, EnrolError> {
    let failed = || EnrolError::connection(format!("cannot connect to {address}"));
    let mut last = Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs().map_err(failed())? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(failed()(last))
}
