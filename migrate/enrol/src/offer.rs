//! The end of the host of the CA.

use crate::error::EnrolError;
use crate::message::{receive, send, unhex, Answer, Bounded, Request, SIGNED};
use crate::pinned::NAME;
use crate::token::Token;
use aws_lc_rs::signature::{UnparsedPublicKey, ECDSA_P256_SHA256_ASN1};
use rcgen::{PublicKeyData, SignatureAlgorithm, PKCS_ECDSA_P256_SHA256};
use rustls::crypto::aws_lc_rs as provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, Stream};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tls::Authority;

/// Requests with a wrong secret after which an offer ends.
pub const ATTEMPTS: usize = 20;
/// Connections at a time.
pub const AT_A_TIME: usize = 16;
/// Pause before the next look for a connection.
const LOOK: Duration = Duration::from_millis(20);
/// Days for which the certificate of the offer itself is valid: its dates are whole days.
const OWN_DAYS: u32 = 2;

/// An offer to one host.
pub struct Offer {
    listener: TcpListener,
    config: Arc<ServerConfig>,
    token: Token,
    authority: Authority,
    authority_pem: String,
    names: Vec<String>,
    days: u32,
    configuration: Option<String>,
    until: Instant,
    progress: Mutex<Progress>,
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer").field("names", &self.names).finish_non_exhaustive()
    }
}

/// What has become of the offer.
#[derive(Debug, Default)]
struct Progress {
    /// Whether the certificate was signed, and whether it has reached the host.
    given: bool,
    delivered: bool,
    /// Requests with a wrong secret.
    wrong: usize,
    connections: usize,
}

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
    /// Prepares an offer of a certificate for `names`, good for `days`, with this configuration. The
    /// token is valid from now on for `valid`.
    ///
    /// # Errors
    /// The CA cannot be used, or the address not listened on.
    pub fn new(
        authority: Authority,
        names: Vec<String>,
        days: u32,
        configuration: Option<String>,
        listen: &[SocketAddr],
        valid: Duration,
    ) -> Result<Self, EnrolError> {
        let authority_pem = authority.certificate()?;
        let authority_der = CertificateDer::from_pem_slice(authority_pem.as_bytes())
            .map_err(EnrolError::certificate)?;
        let token = Token::new(&authority_der)?;
        // Refuses bad names before anybody connects.
        let key = rcgen::KeyPair::generate().map_err(EnrolError::certificate)?;
        authority.sign(&names, days, &key)?;
        let own = authority.sign(&[NAME.to_owned()], OWN_DAYS, &key)?;
        let own =
            CertificateDer::from_pem_slice(own.as_bytes()).map_err(EnrolError::certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())
            .map_err(EnrolError::certificate)?;
        let config = ServerConfig::builder_with_provider(Arc::new(provider::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(EnrolError::certificate)?
            .with_no_client_auth()
            .with_single_cert(vec![own, authority_der], key)
            .map_err(EnrolError::certificate)?;
        let listener = TcpListener::bind(listen)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(EnrolError::connection("cannot listen for the new host"))?;
        Ok(Self {
            listener,
            config: Arc::new(config),
            token,
            authority,
            authority_pem,
            names,
            days,
            configuration,
            until: Instant::now() + valid,
            progress: Mutex::default(),
        })
    }

    /// The token for the new host.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Where the new host can connect.
    ///
    /// # Errors
    /// The kernel's.
    pub fn address(&self) -> Result<SocketAddr, EnrolError> {
        self.listener.local_addr().map_err(EnrolError::connection("the socket of the offer"))
    }

    /// Waits until the host has joined. `notice` is told of refusals.
    ///
    /// # Errors
    /// The offer has expired, or too many requests had a wrong secret.
    pub fn wait(&self, notice: impl Fn(&str) + Sync) -> Result<(), EnrolError> {
        while !self.wait_for(self.until.saturating_duration_since(Instant::now()), &notice)? {}
        Ok(())
    }

    /// As [`wait`](Self::wait), for at most `patience` and the end of connections that are there then.
    /// True when the host has joined.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(
        &self,
        patience: Duration,
        notice: impl Fn(&str) + Sync,
    ) -> Result<bool, EnrolError> {
        let pause = Instant::now() + patience;
        std::thread::scope(|scope| {
            while Instant::now() < pause && self.is_open() {
                match self.listener.accept() {
                    Ok((socket, from)) if self.progress().connections < AT_A_TIME => {
                        self.progress().connections += 1;
                        let notice = &notice;
                        scope.spawn(move || {
                            let served = self.serve(socket);
                            if let Err(error) = &served {
                                notice(&format!("{from} was not enrolled: {error}"));
                            }
                            let mut progress = self.progress();
                            progress.connections -= 1;
                            progress.delivered |= served.is_ok();
                        });
                    }
                    // Dropped: too many at a time.
                    Ok(_) => {}
                    Err(_) => std::thread::sleep(LOOK),
                }
            }
        });
        let progress = self.progress();
        let over = |text: String| Err(EnrolError::Over(text));
        match *progress {
            Progress { delivered: true, .. } => Ok(true),
            Progress { given: true, .. } => over(
                "the connection was lost before the host had its certificate: offer again".into(),
            ),
            Progress { wrong: ATTEMPTS.., .. } => {
                over(format!("{ATTEMPTS} requests had a wrong secret: the offer has ended"))
            }
            _ if Instant::now() >= self.until => {
                over("nobody has come in time: the offer has ended".into())
            }
            _ => Ok(false),
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a host may still join.
    fn is_open(&self) -> bool {
        let progress = self.progress();
        !progress.given && progress.wrong < ATTEMPTS && Instant::now() < self.until
    }

    fn serve(&self, socket: TcpStream) -> Result<(), EnrolError> {
        let failed = || EnrolError::connection("the connection was lost");
        socket.set_nonblocking(false).map_err(failed())?;
        let mut socket = Bounded::new(socket);
        let mut connection =
            ServerConnection::new(self.config.clone()).map_err(EnrolError::certificate)?;
        let mut stream = Stream::new(&mut connection, &mut socket);
        let request: Request = receive(&mut stream)?;
        let answer = match self.answer(&request) {
            Ok(answer) => answer,
            Err(error) => {
                let refused = Answer { error: Some(error.to_string()), ..Answer::default() };
                let _ = send(&mut stream, &refused);
                return Err(error);
            }
        };
        send(&mut stream, &answer)
    }

    /// Signs the certificate, once.
    fn answer(&self, request: &Request) -> Result<Answer, EnrolError> {
        // Held until the certificate is signed, so that no two are.
        let mut progress = self.progress();
        let refused = |why: &str| Err(EnrolError::Message(why.into()));
        if progress.wrong >= ATTEMPTS || Instant::now() >= self.until {
            return refused("the offer has ended");
        }
        if !self.token.has_secret(&request.secret) {
            progress.wrong += 1;
            return refused("the secret of the token is wrong");
        }
        if progress.given {
            return refused("the token was used already");
        }
        let key = unhex(&request.public_key)?;
        let signed = format!("{SIGNED}{}", request.secret);
        let signature = unhex(&request.signature)?;
        let known = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &key);
        if known.verify(signed.as_bytes(), &signature).is_err() {
            return refused("the request is not signed by its key");
        }
        let certificate = self.authority.sign(&self.names, self.days, &HostKey(key))?;
        progress.given = true;
        Ok(Answer {
            error: None,
            authority: self.authority_pem.clone(),
            certificate,
            names: self.names.clone(),
            configuration: self.configuration.clone(),
        })
    }
}
