//! The end of the host of the CA: the offer, and the connections to it.

use crate::connections::Connections;
use crate::error::EnrolError;
use crate::message::encode;
use crate::pinned::NAME;
use crate::token::Token;
use rustls::crypto::aws_lc_rs as provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::ServerConfig;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tls::{Authority, Fingerprint};

/// Number of refusals that are reported; any host can cause any number.
const NOTICES: usize = 20;
/// Bytes by which two certificates with the same names may differ.
const SLACK: usize = 64;
/// Pause before the next look for a connection.
const LOOK: Duration = Duration::from_millis(20);
/// Days for which the certificate of the offer itself is valid: its dates are whole days.
const OWN_DAYS: u32 = 2;

/// An offer to one host.
pub struct Offer {
    listener: TcpListener,
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) token: Token,
    pub(crate) authority: Authority,
    pub(crate) authority_pem: String,
    pub(crate) names: Vec<String>,
    pub(crate) days: u32,
    pub(crate) configuration: Option<String>,
    pub(crate) until: Instant,
    progress: Mutex<Progress>,
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Outcome of the offer.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// The certificate that was signed.
    pub(crate) issued: Option<Fingerprint>,
    pub(crate) end: Option<End>,
}

/// Outcome for the host that has got the certificate.
#[derive(Debug)]
pub(crate) enum End {
    /// The host's files are written.
    Joined,
    /// The host's files are not written, for this reason.
    NotWritten(String),
    /// The connection was lost before the host reported.
    Lost(String),
}

impl Offer {
    /// Prepares an offer of a certificate for `names`, good for `days`, with this configuration, to
    /// a host that connects to `listener`. The token is valid from now on for `valid`.
    ///
    /// # Errors
    /// The CA or the listener cannot be used, or the configuration is too long for a message.
    pub fn new(
        authority: Authority,
        names: Vec<String>,
        days: u32,
        configuration: Option<String>,
        listener: TcpListener,
        valid: Duration,
    ) -> Result<Self, EnrolError> {
        let authority_pem = authority.certificate()?;
        let authority_der = CertificateDer::from_pem_slice(authority_pem.as_bytes())
            .map_err(EnrolError::certificate)?;
        let token = Token::new(&authority_der)?;
        // Bad names are refused here, before any host connects.
        let key = rcgen::KeyPair::generate().map_err(EnrolError::certificate)?;
        let trial = authority.sign(&names, days, &key)?;
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
        listener
            .set_nonblocking(true)
            .map_err(EnrolError::connection("cannot listen for the new host"))?;
        let offer = Self {
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
        };
        // A message that is too long would otherwise be found only after the token was used.
        encode(&offer.with(trial + &" ".repeat(SLACK))).map_err(|error| {
            let bytes = offer.configuration.as_ref().map_or(0, String::len);
            EnrolError::Message(format!(
                "the configuration of {bytes} bytes, with the certificate, is {error}: shorten its \
                 comments"
            ))
        })?;
        Ok(offer)
    }

    /// The token for the new host.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// The address to which the new host can connect.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn address(&self) -> Result<SocketAddr, EnrolError> {
        self.listener.local_addr().map_err(EnrolError::connection("the socket of the offer"))
    }

    /// The certificate that was signed, if one was. A host whose files are not written may have it
    /// too.
    pub fn issued(&self) -> Option<Fingerprint> {
        self.progress().issued
    }

    /// Waits until the host has joined. `notice` gets the refusals.
    ///
    /// The offer has expired, or the host that has the certificate does not report that it has
    /// written its files.
    pub fn wait(&self, notice: impl Fn(&str) + Sync) -> Result<(), EnrolError> {
        self.wait_while(|| true, notice).map(drop)
    }

    /// As [`wait`](Self::wait), while `go_on` returns true; it is called several times a second.
    /// Returns true when the host has joined. A host that has shown the secret by then is waited
    /// for.
    ///
    /// # Errors
    /// The errors of [`wait`](Self::wait).
    pub fn wait_while(
        &self,
        go_on: impl Fn() -> bool,
        notice: impl Fn(&str) + Sync,
    ) -> Result<bool, EnrolError> {
        let (connections, refusals) = (Connections::default(), AtomicUsize::new(0));
        let (connections, notice) = (&connections, &notice);
        let refused = |from: SocketAddr, error: &EnrolError| {
            let said = refusals.fetch_add(1, Ordering::Relaxed);
            // An IPv4 address as it is written, not as a socket of IPv6 has it.
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
            if said < NOTICES {
                notice(&format!("{from} was not enrolled: {error}"));
            } else if said == NOTICES {
                notice("further connections that are not enrolled are not named");
            }
        };
        let refused = &refused;
        std::thread::scope(|scope| {
            for number in 0.. {
                let (socket, from) = loop {
                    if !self.is_open() || !go_on() {
                        // No other host is waited for.
                        connections.close_unproven();
                        return;
                    }
                    match self.listener.accept() {
                        Ok(accepted) => break accepted,
                        Err(_) => std::thread::sleep(LOOK),
                    }
                };
                if connections.add(number, from.ip(), &socket).is_err() {
                    continue;
                }
                let serve = move || {
                    if let Err(error) = self.serve(socket, connections, number) {
                        refused(from, &error);
                    }
                    connections.remove(number);
                };
                // Without a thread the connection ends. The next one may get a thread.
                if std::thread::Builder::new().spawn_scoped(scope, serve).is_err() {
                    connections.remove(number);
                }
            }
        });
        let over = |text: String| Err(EnrolError::Over(text));
        match &self.progress().end {
            Some(End::Joined) => Ok(true),
            Some(End::NotWritten(why)) => over(format!("the new host could not join: {why}")),
            Some(End::Lost(why)) => over(format!(
                "the new host has a certificate, and has not said that its files are written ({why}): \
                 look there, and offer again if they are not"
            )),
            None if Instant::now() >= self.until => {
                over("nobody has come in time: the offer has ended".into())
            }
            None => Ok(false),
        }
    }

    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a host may still join, or is joining.
    fn is_open(&self) -> bool {
        self.progress().end.is_none() && Instant::now() < self.until
    }
}
