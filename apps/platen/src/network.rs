//! The connection between the relays: mutual TLS, or plain TCP with `--insecure`.

use crate::relay_options::TlsOptions;
use anyhow::{bail, Context};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use tls::{Acceptor, Connector, Credentials, TlsError};

fn resolve(address: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().with_context(|| {
        format!("'{address}' is not HOST:PORT with a HOST that can be resolved")
    })?;
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        bail!("'{address}' resolves to no address");
    }
    Ok(found)
}

/// Begins the error if there is no certificate. For a broken certificate it would hide the defect.
const WITHOUT: &str = "relays authenticate each other (--insecure does without: guest memory then \
                       crosses the network in the clear, and whoever reaches the port can deliver a \
                       VM)";

/// Reads this host's certificate. If there is none, the error says what to do.
fn credentials(options: &TlsOptions) -> anyhow::Result<Credentials> {
    let (ca, cert, key) = options.paths();
    let credentials = Credentials::load(&ca, &cert, &key).map_err(|error| match error {
        missing @ TlsError::Missing { .. } => anyhow::Error::new(missing).context(WITHOUT),
        broken => broken.into(),
    })?;
    credentials.check_dates()?;
    Ok(credentials)
}

/// The HOST of HOST:PORT, without the brackets of an IPv6 address.
fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Makes TLS for links to `peer`, whose certificate must contain that name or `--peer-name`; `None`
/// with `--insecure`.
pub(crate) fn connector(
    options: &TlsOptions,
    peer: &str,
    name: Option<&str>,
) -> anyhow::Result<Option<Connector>> {
    resolve(peer)?;
    if options.insecure {
        return Ok(None);
    }
    Ok(Some(Connector::new(&credentials(options)?, name.unwrap_or_else(|| host(peer)))?))
}

/// Makes TLS for links to this host; `None` with `--insecure`.
pub(crate) fn acceptor(options: &TlsOptions, names: &[String]) -> anyhow::Result<Option<Acceptor>> {
    if options.insecure {
        return Ok(None);
    }
    Ok(Some(Acceptor::new(&credentials(options)?, names)?))
}

/// A directory that only this user can open, for sockets. It is removed with the value.
pub(crate) fn private_dir() -> anyhow::Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("platen-").tempdir();
    dir.context("cannot make a private directory")
}

/// Listens for links.
pub(crate) fn listen(address: &str) -> anyhow::Result<TcpListener> {
    let found = resolve(address)?;
    TcpListener::bind(&found[..]).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::AddrInUse => {
                " (another process listens there, which ss -ltnp shows: end it, or choose another port)"
            }
            ErrorKind::AddrNotAvailable => " (this host has no such address, as ip addr shows)",
            _ => "",
        };
        anyhow::Error::new(error).context(format!("cannot listen on {address}{remedy}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tls::Authority;

    fn options(dir: &std::path::Path, insecure: bool) -> TlsOptions {
        TlsOptions { tls_dir: dir.into(), tls_ca: None, tls_cert: None, tls_key: None, insecure }
    }

    #[test]
    fn without_certificates_a_migration_needs_insecure() {
        let folder = tempfile::tempdir().unwrap();
        let safe = options(folder.path(), false);
        for peer in ["127.0.0.1:1", "[::1]:1", "192.0.2.1:1"] {
            let error = format!("{:#}", connector(&safe, peer, None).unwrap_err());
            assert!(error.contains("--insecure") && error.contains("platen cert"), "{error}");
            assert!(connector(&options(folder.path(), true), peer, None).unwrap().is_none());
        }
        let error = format!("{:#}", acceptor(&safe, &[]).unwrap_err());
        assert!(error.contains("--insecure") && error.contains("ca.pem"), "{error}");
        assert!(acceptor(&options(folder.path(), true), &[]).unwrap().is_none());
        assert!(connector(&safe, "nonsense", None).is_err());
    }

    #[test]
    fn a_broken_certificate_is_what_the_error_begins_with() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let issued = authority.issue(&["127.0.0.1".into()], 9, false).unwrap();
        let options = options(&issued.dir, false);
        let (_, cert, _) = options.paths();
        std::fs::write(&cert, "not a certificate").unwrap();
        let error = format!("{:#}", acceptor(&options, &[]).unwrap_err());
        assert!(error.starts_with(&cert.display().to_string()), "{error}");
    }

    #[test]
    fn with_certificates_links_are_secured() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let issued = authority.issue(&["127.0.0.1".into()], 9, false).unwrap();
        let options = options(&issued.dir, false);
        assert!(connector(&options, "127.0.0.1:1", None).unwrap().is_some());
        assert!(connector(&options, "[::1]:1", Some("there")).unwrap().is_some());
        assert!(connector(&options, "127.0.0.1:1", Some("not a name")).is_err());
        assert!(acceptor(&options, &["here".into()]).unwrap().is_some());
    }

    #[test]
    fn the_host_of_a_peer_is_its_name() {
        assert_eq!(host("there.example:4444"), "there.example");
        assert_eq!(host("10.0.0.2:4444"), "10.0.0.2");
        assert_eq!(host("[fe80::2]:4444"), "fe80::2");
    }
}
